"""`python -m gradtracer` is the command `gradtracer`."""

from gradtracer.cli import main

if __name__ == "__main__":
    main()
