"""The torch side: what runs inside the training process."""
