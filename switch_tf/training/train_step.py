"""One training step: gradients of the whole batch's loss, then the update; `compile_steps` makes a function of both."""

import tensorflow as tf

from switch_tf import losses, metrics, partitioning
from switch_tf.layers import masks
from switch_tf.metrics import Mean, RouterStats
from switch_tf.partitioning.partitioner import Partitioner


def compute_gradients(model, features, seed, step, settings, partitioner=None):
    """Gradients of the loss over the whole batch, accumulated over its microbatches and its parts on other devices.

    Args:
        model: built SwitchTransformer.
        features: dict of <int32>[batch, length], this part of the batch.
        seed: int, the run's.
        step: <int> scalar.
        settings: StepSettings.
        partitioner: Partitioner, by default of one device.

    Returns:
        `(gradients, metrics)`: a dense tensor for each trainable variable; dict of name -> Mean.
    """
    partitioner = partitioner or Partitioner()
    # Every part's losses are divided by the whole batch's tokens, so that parts just add up.
    weights = partitioner.sum_over_parts(loss_weights(model.config, features))
    variables = [variable.value for variable in model.trainable_variables]
    count = settings.num_microbatches
    num_parts, part_index = partitioner.current_part()

    def part(index):
        rows = {name: _rows(value, index, count) for name, value in features.items()}
        step_seed = partitioning.step_seed(seed, step)
        this_part = partitioning.part_of_batch(count * num_parts, index + count * part_index)
        with this_part, partitioning.random_seed(step_seed), tf.GradientTape() as tape:
            logits, router_stats = model.forward(rows, training=True)
            part_metrics = batch_metrics(model.config, rows, logits, router_stats, settings)
            loss = total_loss(model.config, part_metrics, weights)
            # Inside the scopes, because rematerialised layers run again here.
            gradients = tape.gradient(loss, variables)
        return [tf.convert_to_tensor(gradient) for gradient in gradients], part_metrics

    if count == 1:
        return partitioner.sum_over_parts(part(0))

    def add_part(index, gradients, sums):
        more_gradients, more = part(index)
        return (index + 1, [a + b for a, b in zip(gradients, more_gradients, strict=True)], metrics.merge(sums, more))

    start = (tf.constant(0), [tf.zeros_like(variable) for variable in variables], empty_metrics(model.config))
    # One at a time: the point is to hold one part's activations.
    _, gradients, sums = tf.while_loop(lambda index, *_: index < count, add_part, start, parallel_iterations=1)
    return partitioner.sum_over_parts((gradients, sums))


def apply_gradients(model, optimizer, gradients, norm, settings):
    """Clips by global norm, if asked to, and lets the optimizer update every variable once."""
    if settings.clip_norm is not None:
        scale = settings.clip_norm / tf.maximum(norm, settings.clip_norm)
        gradients = [gradient * scale for gradient in gradients]
    optimizer.apply(gradients, model.trainable_variables)


def target_features(config) -> tuple[str, str]:
    """Names of the features with targets and their loss weights: the decoder's, or the encoder's where it is alone."""
    stack = "encoder" if config.is_encoder_only else "decoder"
    return f"{stack}_target_tokens", f"{stack}_loss_weights"


def loss_weights(config, features) -> dict[str, tf.Tensor]:
    """What each part of the loss is divided by, known before the forward pass: numbers of tokens of the whole batch."""
    weights = {"targets": tf.reduce_sum(tf.cast(features[target_features(config)[1]], tf.float32))}
    stacks = {"encoder": masks.encoder_is_real(features)}
    if not config.is_encoder_only:
        stacks["decoder"] = masks.decoder_is_real(features)
    for stack, is_real in stacks.items():
        num_real = tf.reduce_sum(tf.cast(is_real, tf.float32))
        num_all = tf.cast(tf.size(is_real), tf.float32)
        weights[f"{stack}/load_balancing_loss"] = num_all if config.rules.balance_counts_padding else num_real
        weights[f"{stack}/router_z_loss"] = num_all if config.rules.routes_padding else num_real
    return weights


def batch_metrics(config, features, logits, router_stats, settings) -> dict[str, Mean]:
    """Everything that is measured on a batch, as Means: the parts of the loss and each router's statistics."""
    target_name, weight_name = target_features(config)
    cross_entropy, z_loss, accuracy = losses.cross_entropy(
        logits, features[target_name], features[weight_name], settings.z_loss_weight, settings.label_smoothing)
    num_tokens = tf.reduce_sum(tf.cast(masks.encoder_is_real(features), tf.float32))
    if not config.is_encoder_only:
        num_tokens += tf.reduce_sum(tf.cast(masks.decoder_is_real(features), tf.float32))
    measured = {"cross_entropy": cross_entropy, "z_loss": z_loss, "accuracy": accuracy,
                "tokens": Mean(num_tokens, _share_of_step())}
    for layer, stats in zip(config.sparse_layer_names, router_stats, strict=True):
        for name, mean in stats._asdict().items():
            measured[f"router/{layer}/{name}"] = Mean(tf.stop_gradient(mean.total), mean.weight) if (
                name not in ("load_balancing_loss", "router_z_loss")) else mean
    return measured


def empty_metrics(config) -> dict[str, Mean]:
    """The zeros that `batch_metrics` add up to."""
    zeros = {name: Mean(tf.zeros([]), tf.zeros([])) for name in ("cross_entropy", "z_loss", "accuracy", "tokens")}
    for layer in config.sparse_layer_names:
        for name in RouterStats._fields:
            shape = [config.num_experts] if name == "expert_load" else []
            zeros[f"router/{layer}/{name}"] = Mean(tf.zeros(shape), tf.zeros([]))
    return zeros


def total_loss(config, measured, weights):
    """The loss that is minimised: cross-entropy and its z-loss, plus both router losses summed over sparse layers."""
    loss = (measured["cross_entropy"].total + measured["z_loss"].total) / tf.maximum(weights["targets"], 1.0)
    for layer in config.sparse_layer_names:
        stack = layer.partition("/")[0]
        for name, coefficient in (("load_balancing_loss", config.load_balancing_loss_weight),
                                  ("router_z_loss", config.router_z_loss_weight)):
            divisor = tf.maximum(weights[f"{stack}/{name}"], 1.0)
            loss += coefficient * measured[f"router/{layer}/{name}"].total / divisor
    return loss


def compile_steps(model, optimizer, seed, settings, partitioner=None):
    """Traces `steps_per_call` training steps as one function.

    Args:
        model: built SwitchTransformer.
        optimizer: built Keras optimizer; its `iterations` is the step.
        seed: int, the run's.
        settings: StepSettings.
        partitioner: Partitioner, by default of one device.

    Returns:
        A function of `partitioner.place`d features, <int32>[steps_per_call, batch, length], that returns
        `(metrics, bad_step)`: merged metrics of the steps that were taken, dict of name -> Mean, and the <int32> index
        of the first one whose loss or gradient was not finite, or -1. That step and those after it change nothing.
    """
    partitioner = partitioner or Partitioner()

    def compute(features):
        gradients, measured = compute_gradients(model, features, seed, optimizer.iterations.value, settings,
                                                partitioner)
        norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
        measured["gradient_norm"] = Mean(norm, tf.ones([]))
        return gradients, norm, measured, tf.math.is_finite(norm) & tf.math.is_finite(measured["cross_entropy"].total)

    def apply(gradients, norm):
        apply_gradients(model, optimizer, gradients, norm, settings)

    one_step = partitioner.step(compute, apply, settings.use_xla)

    def call(features):
        if settings.steps_per_call == 1:
            measured, is_finite = one_step(features, 0)
            return measured, tf.where(is_finite, -1, 0)

        def is_good(index, sums, bad_step):
            return (index < settings.steps_per_call) & (bad_step < 0)

        def next_step(index, sums, bad_step):
            measured, is_finite = one_step(features, index)
            return index + 1, metrics.merge(sums, measured), tf.where(is_finite, -1, index)

        zeros = {**empty_metrics(model.config), "gradient_norm": Mean(tf.zeros([]), tf.zeros([]))}
        _, sums, bad_step = tf.while_loop(is_good, next_step, (tf.constant(0), zeros, tf.constant(-1)))
        return sums, bad_step

    return partitioner.compile(call, settings.use_xla)


def _rows(value, index, count):
    """Part `index` of the batch: <int32>[batch, length] -> <int32>[batch / count, length], over all devices."""
    if count == 1:
        return value
    parts = tf.reshape(partitioning.constrain(value, (None, "length")), (count, -1, *value.shape[1:]))
    return partitioning.constrain(parts[index], ("batch", "length"))


def _share_of_step():
    """What a part of the batch counts for in a mean over steps."""
    return tf.constant(1 / partitioning.current_part().count)
