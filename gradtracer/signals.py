"""The recorded signals: their names, units, meaning, and when each is read.

A signal belongs to the run (one number a step) or to a layer (one number a layer at sampled steps). Journals store
them as float32 with two reserved values: NaN means "not recorded here", infinity means "recorded, and not finite".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MISSING = float("nan")
NON_FINITE = float("inf")

LOSS_LAYER, INPUT_LAYER = "(loss)", "(input)"
"""Layer names under which signals of the loss and of the model's input are recorded."""


@dataclass(frozen=True)
class Signal:
    """One recorded quantity."""

    name: str
    scope: Literal["run", "layer"]
    unit: str
    description: str


_ALL = (
    Signal("loss", "run", "", "The loss that backward was called on, or that tracker.step was given."),
    Signal("grad_norm", "run", "", "Euclidean norm over all gradients, as the optimizer receives them."),
    Signal("learning_rate", "run", "", "Learning rate of the first parameter group."),
    Signal("step_time_s", "run", "s", "Wall time from the end of the step before to the end of this one."),
    Signal("num_non_finite_grads", "run", "layers", "Layers whose gradient holds a NaN or an infinity."),
    Signal("grad_norm", "layer", "", "Euclidean norm of the layer's gradient, as the optimizer receives it."),
    Signal("grad_mean", "layer", "", "Mean over the elements of the gradient."),
    Signal("grad_std", "layer", "", "Standard deviation over the elements of the gradient."),
    Signal("grad_growth_rate", "layer", "1/step", "d log ||g|| / d step, least squares over the last steps."),
    Signal("step_cosine", "layer", "", "Cosine between this gradient and that of the step before; -1 oscillates."),
    Signal("zero_grad_fraction", "layer", "", "Share of output units whose gradient row is exactly zero."),
    Signal("weight_norm", "layer", "", "Euclidean norm of the layer's parameters before the update."),
    Signal("update_ratio", "layer", "", "||update|| / ||weights|| of this step."),
    Signal("num_non_finite_grad", "layer", "elements", "Parameters' tensors whose gradient norm is not finite."),
    Signal("num_non_finite_weight", "layer", "elements", "Non-finite elements in the layer's parameters."),
    Signal("activation_mean", "layer", "", "Mean of the layer's output."),
    Signal("activation_std", "layer", "", "Standard deviation of the layer's output."),
    Signal("activation_zero_fraction", "layer", "", "Share of exact zeros in the output."),
    Signal(
        "dead_unit_fraction",
        "layer",
        "",
        "Share of units of a rectifier that were zero in each of the last 256 rows read.",
    ),
    Signal("saturated_fraction", "layer", "", "Share of outputs of tanh or sigmoid within 1 % of a bound."),
    Signal("effective_rank", "layer", "", "Participation ratio (tr C)^2 / tr C^2 of the output's covariance."),
    Signal("attention_entropy", "layer", "", "Mean entropy of attention rows over the log of the keys they may see."),
    Signal("attention_saturation", "layer", "", "Share of attention rows with less than a tenth of that entropy."),
    Signal("attention_logit_std", "layer", "", "Standard deviation of the attention's logits over the keys, a mean."),
    Signal("attention_key_share", "layer", "", "Share of attention rows that look most at the most looked-at key."),
    Signal(
        "row_spread", "layer", "", "One minus the mean cosine over pairs of output rows; 0 where all point one way."
    ),
    Signal(
        "latent_information", "layer", "nats", "What a sampled latent can carry: sum of ln(1 + Var mu / sigma^2) / 2."
    ),
    Signal("latent_kl", "layer", "nats", "Divergence of a sampled latent from the standard normal law, per example."),
    Signal("codebook_perplexity", "layer", "codes", "Perplexity of the codes that a batch's vectors are nearest to."),
    Signal("codebook_usage", "layer", "", "That perplexity over the number of codes that the batch could use."),
    Signal("starved_expert_fraction", "layer", "", "Share of a router's experts without gradient in the last samples."),
    Signal("routing_top_share", "layer", "", "Share of rows for which a router prefers its most preferred expert."),
    Signal("unseen_row_fraction", "layer", "", "Share of an embedding's rows that no sampled batch has looked up."),
    Signal("silent_row_fraction", "layer", "", "Of rows looked up in 10 samples: share that never had a gradient."),
    Signal("row_update_ratio", "layer", "", "||update|| / ||row|| of the rows of an embedding that a batch looks up."),
    Signal("rare_row_gradient", "layer", "", "Gradient a look-up of rarely drawn rows over that of the most drawn."),
    Signal("num_non_finite_activation", "layer", "elements", "Non-finite elements in the output."),
    Signal("decay_per_step", "layer", "1/step", "Share of the weights that weight decay takes away at this step."),
    Signal("decay_over_gradient", "layer", "", "||weight_decay w|| / ||g|| where decay is added to the gradient."),
    Signal("loss_scale", "layer", "", "Factor by which a GradScaler multiplied the loss; of the layer `(loss)`."),
    Signal(
        "label_entropy", "layer", "nats", "Entropy of the labels over all sampled steps: the loss of a blind guess."
    ),
    Signal("num_labels", "layer", "", "Labels counted so far."),
    Signal("num_label_outputs", "layer", "", "Classes that the model tells apart."),
    Signal("num_label_classes", "layer", "", "Classes seen among the labels so far."),
    Signal("label_top_share", "layer", "", "Share of the most frequent class so far."),
    Signal("label_first_share", "layer", "", "Share of class 0 so far."),
    Signal("label_least_count", "layer", "", "How often the rarest of the other classes came so far."),
    Signal("label_is_free", "layer", "", "1 where a layer of its own makes each class's score."),
    Signal("labels_per_row", "layer", "", "Labels for each row of the model's input."),
    Signal("label_collision", "layer", "", "Chance that two rows of a step have one label."),
    Signal("label_collision_pooled", "layer", "", "The same over all sampled steps."),
    Signal(
        "label_dependence",
        "layer",
        "",
        "Variance of outputs or inputs between labels, over chance; 1 is chance, -1 unknown.",
    ),
    Signal("label_dependence_best", "layer", "", "The most telling input column, in standard deviations of chance."),
    Signal("label_loss", "layer", "nats", "Mean negative log-likelihood of a label (squared error of a value)."),
    Signal("label_weight_spread", "layer", "", "Largest over smallest weight of a class."),
    Signal("label_top_class", "layer", "", "The most frequent class of the step."),
    Signal("num_rare_labels", "layer", "", "Rows of the step whose label is not the most frequent one."),
    Signal("num_rare_labels_found", "layer", "", "Those of them for which the model chose that label."),
    Signal("value_dependence", "layer", "", "R^2 (N - 1) of prediction and target; 1 is chance."),
    Signal("target_variance", "layer", "", "Variance of a step's targets."),
    Signal("target_variance_pooled", "layer", "", "Variance of the targets over all sampled steps."),
    Signal("running_mean_gap", "layer", "", "Distance of a running mean from all recent batches, in deviations."),
    Signal("running_var_gap", "layer", "nats", "Log of running over batch deviation, where all batches agree."),
    Signal("running_mean_noise", "layer", "", "Standard deviation of batch means, in deviations of the values."),
    Signal("num_batches_tracked", "layer", "", "Batches that a normalisation has seen."),
    Signal("norm_momentum", "layer", "", "Momentum of a batch normalisation; -1 for a cumulative average."),
    Signal("input_rms", "layer", "", "Root mean square of the model's input."),
    Signal("input_column_spread", "layer", "", "Largest over median root mean square of the columns of a table."),
    Signal("target_rms", "layer", "", "Root mean square of the targets of a regression."),
    Signal("data_wait_s", "layer", "s", "Time from the end of the step before to the first layer that ran."),
    Signal("compute_s", "layer", "s", "Time from there to the end of the step."),
    Signal("num_retained_graphs", "layer", "", "Graphs of steps at least 40 steps ago that are still held."),
    Signal("num_watched_graphs", "layer", "", "Graphs of steps at least 40 steps ago that were watched."),
    Signal("resident_bytes", "layer", "bytes", "Memory of the process, or of the device where the model is on one."),
)

RUN_SIGNALS: dict[str, Signal] = {s.name: s for s in _ALL if s.scope == "run"}
LAYER_SIGNALS: dict[str, Signal] = {s.name: s for s in _ALL if s.scope == "layer"}
