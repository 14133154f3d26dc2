"""The mutants: what is changed where, and the tests that notice first.

Each is one wrong line that somebody could have written. `old` stands once in its file.
"""

from typing import NamedTuple

ROUTING = ("tests/layers/routing_test.py", "tests/layers/deciders_test.py", "tests/layers/routing_golden_test.py",
           "tests/layers/routing_exploration_test.py")
DECIDERS = ("tests/layers/deciders_test.py", "tests/layers/routing_golden_test.py", "tests/layers/routing_test.py")
LOSSES = ("tests/losses_test.py", "tests/parity/mesh_tensorflow_test.py", "tests/layers/routing_golden_test.py")
JOINED = ("tests/parity/hugging_face_losses_test.py",)
DISPATCH = ("tests/layers/dispatch_test.py", "tests/layers/routing_dispatch_test.py")
LAYER = ("tests/layers/moe_test.py", "tests/layers/moe_keras_test.py", "tests/layers/experts_test.py")
GROUPING = ("tests/layers/grouping_test.py", "tests/layers/moe_test.py")
DROPOUT = ("tests/layers/dropout_test.py",)
ADAFACTOR = ("tests/optim/adafactor_test.py",)
STEP = ("tests/evaluation/objective_test.py", "tests/training/train_step_test.py")
EVALUATOR = ("tests/data/evaluator_test.py", "tests/tasks/downstream_test.py")
RESULTS = ("tests/comparison/results_test.py",)
OBJECTIVE = ("tests/evaluation/objective_test.py", "tests/evaluation/semantics_loss_test.py")


class Mutant(NamedTuple):
    """`old` becomes `new` in switch_tf/`file`, or in a `file` that begins with "tasks/"; `tests` are asked first;
    `survives`: why nothing can notice, or ""."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    @property
    def path(self) -> str:
        """The path from the root of the repository."""
        return self.file if self.file.startswith("tasks/") else f"switch_tf/{self.file}"


MUTANTS = (
    # The router.
    Mutant("layers/routing.py", "NO_PREFERENCE = -1e9", "NO_PREFERENCE = 1e9", ROUTING),
    Mutant("layers/routing.py", "INPUT_DROPOUT_RATE = 0.1", "INPUT_DROPOUT_RATE = 0.2", ROUTING),
    Mutant("layers/routing.py", "ops.cast(1 - self.jitter_noise + 2 *", "ops.cast(1 - self.jitter_noise + 1 *",
           ROUTING),
    Mutant("layers/routing.py", 'if training and self.exploration == "input_jitter"',
           'if self.exploration == "input_jitter"', ROUTING),
    Mutant("layers/routing.py", 'random.layer_seed(self, "jitter")',
           'random.layer_seed(self, "second_expert")', ROUTING,
           survives="another stream of the same random numbers, which nothing says must be this one"),
    Mutant("layers/routing.py", "dropout.mask(noise, INPUT_DROPOUT_RATE, x.dtype)",
           "dropout.mask(noise, INPUT_DROPOUT_RATE, x.dtype) * (1 - INPUT_DROPOUT_RATE)", ROUTING),
    Mutant("layers/routing.py", 'if training and self.exploration == "sample"', 'if self.exploration == "sample"',
           ROUTING),
    Mutant("layers/routing.py", "selection = selection + _gumbel(", "selection = selection - _gumbel(", ROUTING),
    Mutant("layers/routing.py", "ops.clip(ops.where(ops.isnan(selection), NO_PREFERENCE, selection)",
           "ops.clip(selection", ("tests/layers/routing_layer_properties_test.py",)),
    Mutant("layers/routing.py", "uniform if training else None", "None", ROUTING),
    Mutant("layers/routing.py", "self._rules.normalizes_gates, training, is_wanted", "True, training, is_wanted",
           ("tests/layers/routing_golden_test.py", "tests/configs/semantics_test.py", *ROUTING)),
    Mutant("layers/routing.py", "fraction_tokens_dropped=Mean(num_real - counts.num_served, num_real)",
           "fraction_tokens_dropped=Mean(num_real - counts.num_filled, num_real)", ROUTING),
    Mutant("layers/routing.py", "router_confidence=Mean(ops.sum(ops.max(probs, axis=-1) * real), num_real)",
           "router_confidence=Mean(ops.sum(ops.max(probs, axis=-1)), num_real)", ROUTING),
    Mutant("layers/routing.py", "router_entropy=Mean(ops.sum(entropy * real), num_real)",
           "router_entropy=Mean(ops.sum(entropy), num_real)", ROUTING),
    Mutant("layers/routing.py", "num_real = ops.sum(real)", "num_real = ops.sum(ops.ones_like(real))", ROUTING),
    Mutant("layers/routing.py", "no_loss if self._policy.is_balanced else",
           "no_loss if self._rules.routes_padding else", ("tests/layers/router_losses_test.py", *ROUTING)),
    Mutant("layers/routing.py", "chosen = decisions.expert_index if preferred is None else preferred",
           "chosen = decisions.expert_index", ("tests/layers/routing_golden_test.py", *ROUTING)),
    # The policies.
    Mutant("layers/deciders.py", "NTLB_ROUNDS = 4", "NTLB_ROUNDS = 3", DECIDERS),
    Mutant("layers/deciders.py", "SINKHORN_ITERATIONS = 20", "SINKHORN_ITERATIONS = 1", DECIDERS),
    Mutant("layers/deciders.py", "order = ops.argsort(-confidence, axis=1)", "order = ops.argsort(confidence, axis=1)",
           DECIDERS),
    Mutant("layers/deciders.py", "confidence = ops.where(ops.isnan(confidence), -1.0, confidence)",
           "confidence = ops.where(ops.isnan(confidence), 2.0, confidence)", DECIDERS),
    Mutant("layers/deciders.py", "wanted = later > threshold", "wanted = later >= 0", DECIDERS),
    Mutant("layers/deciders.py", "* threshold < later", "< later", DECIDERS),
    Mutant("layers/deciders.py", 'ops.ones_like(gates[..., :1], dtype="bool"), wanted', "wanted[..., :1], wanted",
           DECIDERS),
    Mutant("layers/deciders.py", "place = place + ops.take_along_axis(taken, expert, axis=1)", "place = place + 0",
           DECIDERS),
    Mutant("layers/deciders.py", "taken = taken + length", "taken = length", DECIDERS),
    Mutant("layers/deciders.py", "waiting = ops.logical_and(waiting, ops.logical_not(is_kept))",
           "waiting = ops.logical_and(waiting, is_kept)", DECIDERS),
    Mutant("layers/deciders.py", "if scores.is_real is None else scores.is_real\n    num_groups",
           "if True else scores.is_real\n    num_groups", DECIDERS),
    Mutant("layers/deciders.py", 'ops.cast(scores.token_ids, "int32")[..., None] % options.num_experts',
           'ops.cast(scores.token_ids, "int32")[..., None] // options.num_experts', DECIDERS),
    Mutant("layers/deciders.py", "    if options.training:\n", "    if True:\n", DECIDERS),
    Mutant("layers/deciders.py", "logits = ops.stop_gradient(logits)", "logits = logits * 1",
           ("tests/layers/deciders_test.py",)),
    Mutant("layers/deciders.py", "-1e9 * ops.cast(ops.logical_not(", "0.0 * ops.cast(ops.logical_not(", DECIDERS),
    Mutant("layers/deciders.py", "wanted = ops.where(scores.is_real[:, None, :], wanted, -1.0)",
           "wanted = ops.where(scores.is_real[:, None, :], wanted, 0.0)", DECIDERS),
    Mutant("layers/deciders.py", "wanted = ops.softmax(ops.transpose(scores.selection, (0, 2, 1)), axis=1)",
           "wanted = ops.softmax(ops.transpose(scores.selection, (0, 2, 1)), axis=2)", DECIDERS),
    # The queues, and what was decided.
    Mutant("layers/queues.py", "gates = gates / (ops.sum(gates, axis=-1, keepdims=True) + 1e-9)", "gates = gates * 1",
           DECIDERS),
    Mutant("layers/queues.py", "if expert_index.shape[-1] > 1 and options.is_normalized",
           "if expert_index.shape[-1] > 2 and options.is_normalized", DECIDERS),
    Mutant("layers/queues.py", "routed = ops.logical_and(routed, is_wanted(gates))", "routed = routed", DECIDERS),
    Mutant("layers/queues.py", "gates = ops.where(slot < options.capacity, gates, 0.0)", "gates = gates * 1.0",
           DECIDERS),
    Mutant("layers/queues.py", "ops.logical_and(routed, place < options.capacity)",
           "ops.logical_and(routed, place <= options.capacity)", DECIDERS,
           survives="a place that equals the capacity is written as the capacity either way: dropped"),
    Mutant("layers/queues.py", "in_line = ops.where(routed, expert_index, options.num_experts)",
           "in_line = expert_index", DECIDERS),
    Mutant("layers/queues.py", "start = ops.cumsum(length, axis=1) - length", "start = ops.cumsum(length, axis=1)",
           DECIDERS),
    Mutant("layers/queues.py", "ops.reshape(ops.transpose(in_line, (0, 2, 1)), (num_groups",
           "ops.reshape(in_line, (num_groups", DECIDERS),
    Mutant("layers/queues.py", "slot = ops.take_along_axis(slot, ops.argsort(order, axis=1), axis=1)",
           "slot = ops.take_along_axis(slot, order, axis=1)", DECIDERS),
    Mutant("layers/queues.py", "chosen = ops.one_hot(expert_index, num_experts, dtype=scores.probs.dtype)",
           "chosen = ops.one_hot(0 * expert_index, num_experts, dtype=scores.probs.dtype)",
           DECIDERS),
    Mutant("layers/decisions.py", "return self.slot < self.capacity", "return self.slot <= self.capacity", DECIDERS),
    Mutant("layers/decisions.py", "ops.any(is_filled, axis=-1)", "ops.all(is_filled, axis=-1)", DECIDERS),
    Mutant("layers/decisions.py", 'wants = wants * ops.cast(is_real[..., None], "int32")', "wants = wants * 1",
           ROUTING),
    # The losses.
    Mutant("losses.py", "expert_index[..., 1:2]", "expert_index[..., 2:3]", ("tests/layers/router_losses_test.py",)),
    Mutant("losses.py", "is_left = 1.0 - ops.one_hot(expert_index[..., 0]",
           "is_left = 1.0 - 0 * ops.one_hot(expert_index[..., 0]", LOSSES),
    Mutant("losses.py", "left = left / (ops.sum(left, axis=-1, keepdims=True) + 1e-9)", "left = left * 1.0", LOSSES),
    Mutant("losses.py", "if rules.balances_every_choice and has_choices", "if has_choices", LOSSES),
    Mutant("losses.py", "if rules.balances_over_all_tokens and num_choices == 1", "if rules.balances_over_all_tokens",
           LOSSES),
    Mutant("losses.py", "divisor = num_tokens if rules.balances_over_all_tokens else ops.sum(real, axis=1)",
           "divisor = num_tokens", LOSSES),
    Mutant("losses.py", "fraction = ops.sum(chosen * counted, axis=1) / safe_divisor",
           "fraction = ops.sum(chosen, axis=1) / safe_divisor", LOSSES),
    Mutant("losses.py", "mean_prob = ops.sum(probs * counted, axis=1) / safe_divisor",
           "mean_prob = ops.sum(probs, axis=1) / safe_divisor", LOSSES),
    Mutant("losses.py", "squared = ops.square(ops.logsumexp(", "squared = ops.abs(ops.logsumexp(", LOSSES),
    Mutant("losses.py", "return Mean(ops.sum(squared * real), ops.sum(real))",
           "return Mean(ops.sum(squared), ops.sum(real))", LOSSES),
    Mutant("losses.py", "z_loss = z_loss_weight * ops.sum(ops.square(log_normalizer) * weights)",
           "z_loss = z_loss_weight * ops.sum(ops.square(log_normalizer))", LOSSES),
    Mutant("losses.py", "label_smoothing * ops.mean(logits, axis=-1)", "label_smoothing * ops.max(logits, axis=-1)",
           LOSSES),
    Mutant("losses.py", "loss = ops.sum((log_normalizer - target_logit) * weights)",
           "loss = ops.sum(log_normalizer - target_logit)", LOSSES),
    Mutant("losses.py", "+ z_weight * stats.router_z_loss.value",
           "+ balance_weight * stats.router_z_loss.value", ("tests/layers/moe_keras_test.py",)),
    Mutant("models/joining.py", "ops.zeros_like(mean.total) if is_omitted else",
           "ops.zeros_like(mean.total) if True else", JOINED),
    Mutant("models/joining.py", "mean.total / len(router_stats)", "mean.total", JOINED),
    # Dispatch and combine.
    Mutant("layers/dispatch.py", "ROWS_PER_PRODUCT = 40", "ROWS_PER_PRODUCT = 0", DISPATCH),
    Mutant("layers/dispatch.py", 'return next(name for name in forms.suited_dispatches() if name != "ragged")',
           "return forms.suited_dispatches()[0]", DISPATCH),
    Mutant("layers/dispatch.py", "self.decisions.gate[:, :, choice:choice + 1]", "self.decisions.gate[:, :, :1]",
           DISPATCH),
    Mutant("layers/dispatch.py", "buffer_row = ops.where(decisions.is_filled, buffer_row, num_buffer_rows)",
           "buffer_row = ops.minimum(buffer_row, num_buffer_rows - 1)", DISPATCH),
    Mutant("layers/dispatch.py", "self.choice_of_row = ops.where(filled > 0, filled - 1, num_rows)",
           "self.choice_of_row = ops.maximum(filled - 1, 0)", DISPATCH),
    Mutant("layers/dispatch.py", "_gated(own, ops.expand_dims(self.gate, -1))", "_gated(own, 1.0)", DISPATCH),
    Mutant("layers/dispatch.py", "lambda upstream: sum(read(upstream, index) for index in back), rows)",
           "lambda upstream: read(upstream, back[0]), rows)", DISPATCH),
    Mutant("layers/dispatch.py",
           "token = ops.where(token < num_tokens, token + group * num_tokens, num_groups * num_tokens)",
           "token = ops.where(token < num_tokens, token, num_groups * num_tokens)", DISPATCH),
    Mutant("layers/dispatch.py", "return ops.take(starts, queue) + decisions.slot,", "return ops.take(starts, queue),",
           DISPATCH),
    Mutant("layers/ragged.py", "ends[i] - lengths[i], 0), (lengths[i]", "ends[i] - lengths[i], 0), (lengths[0]",
           DISPATCH),
    Mutant("layers/moe.py", "may_miss = not isinstance(missing, int) or missing > 0", "may_miss = False", LAYER),
    Mutant("layers/moe.py", "x[:batch * length] if may_miss", "x[-batch * length:] if may_miss", LAYER),
    Mutant("layers/experts.py", "return dropout.mask(draws, self.dropout_rate, dtype)",
           "return dropout.mask(draws, self.dropout_rate, dtype) * (1 - self.dropout_rate)", LAYER[::-1]),
    Mutant("layers/dropout.py", "* (1 / (1 - rate))", "* (1 / rate)", DROPOUT),
    Mutant("layers/dropout.py", "dtypes.widen(x) * factors", "x * ops.cast(factors, x.dtype)", DROPOUT),
    Mutant("layers/dropout.py", "draws >= rate", "draws >= 1 - rate", DROPOUT),
    # Groups and capacities.
    Mutant("layers/grouping.py", "factor = model.train_capacity_factor if training else model.eval_capacity_factor",
           "factor = model.train_capacity_factor", GROUPING),
    Mutant("layers/grouping.py", "return -(-num_tokens // group_size)", "return num_tokens // group_size", GROUPING),
    Mutant("layers/grouping.py", "if rules.rounds_capacity else math.floor(", "if False else math.floor(", GROUPING),
    Mutant("layers/grouping.py", "is_up = ops.logical_or(twice_rest > divisor,",
           "is_up = ops.logical_or(twice_rest >= divisor,", (*GROUPING, "tests/layers/routing_properties_test.py")),
    Mutant("layers/grouping.py", "return minimum(maximum(capacity, min_expert_capacity), group_tokens)",
           "return maximum(capacity, min_expert_capacity)", GROUPING),
    Mutant("layers/grouping.py", "return maximum(minimum(capacity, group_tokens), min_expert_capacity)",
           "return minimum(maximum(capacity, min_expert_capacity), group_tokens)", GROUPING),
    # Adafactor and its schedule.
    Mutant("optim/adafactor.py", ") + 1) ** -self.decay_exponent", ") + 2) ** -self.decay_exponent", ADAFACTOR),
    Mutant("optim/adafactor.py", "_root_mean_square(update, within) / self.clip_threshold",
           "_root_mean_square(update, within) * self.clip_threshold", ADAFACTOR),
    Mutant("optim/adafactor.py", "ops.maximum(self.minimum_scale, _root", "ops.minimum(self.minimum_scale, _root",
           ADAFACTOR),
    Mutant("optim/adafactor.py", "if dim not in stacked)", "if dim not in ())", ADAFACTOR),
    Mutant("optim/adafactor.py", "ops.mean(squared, axis=factors.columns) + self.epsilon",
           "ops.mean(squared, axis=factors.columns)", ADAFACTOR),
    Mutant("optim/adafactor.py", "ops.mean(squared, axis=factors.rows) + self.epsilon",
           "ops.mean(squared, axis=factors.rows)", ADAFACTOR),
    Mutant("optim/adafactor.py", "row_mean = row_mean / ops.mean(row_mean, axis=factors.rows, keepdims=True)",
           "row_mean = row_mean / ops.mean(row_mean, keepdims=True)", ADAFACTOR),
    Mutant("optim/adafactor.py", "+ (1 - beta2) * value", "+ beta2 * value", ADAFACTOR),
    Mutant("optim/factoring.py", '_COLUMNS = frozenset(("vocab", "heads", "kv", "mlp", "expert_mlp"))',
           '_COLUMNS = frozenset(("vocab", "kv", "mlp", "expert_mlp"))', ADAFACTOR),
    Mutant("optim/factoring.py", "if shape[small] < min_size:", "if shape[small] <= min_size:", ADAFACTOR),
    Mutant("optim/schedules.py", "ops.rsqrt(ops.maximum(", "ops.rsqrt(ops.minimum(",
           ("tests/optim/schedules_test.py",)),
    # The step and its objective.
    Mutant("training/train_step.py", "partitioning.part_of_batch(count * num_parts, index + count * part_index)",
           "partitioning.part_of_batch(count * num_parts, count * part_index)", STEP),
    Mutant("training/train_step.py", "random.random_seed(random.step_seed(seed, step))",
           "random.random_seed(random.step_seed(seed, 0))", STEP),
    Mutant("training/train_step.py", "scale = settings.clip_norm / tf.maximum(norm, settings.clip_norm)",
           "scale = settings.clip_norm / norm", STEP),
    Mutant("training/train_step.py", "[a + b for a, b in zip(gradients, more_gradients, strict=True)]",
           "more_gradients", STEP),
    Mutant("training/train_step.py", "return index + 1, metrics.merge(sums, measured), tf.where(is_finite, -1, index)",
           "return index + 1, measured, tf.where(is_finite, -1, index)", STEP),
    Mutant("training/train_step.py", "is_finite = tf.math.is_finite(norm)", "is_finite = tf.constant(True)", STEP),
    Mutant("training/train_step.py", "loss = total_loss(model.config, weighed(measured, weights))",
           "loss = total_loss(model.config, measured)", STEP),
    Mutant("evaluation/objective.py",
           "load_balancing_loss=num_all if config.rules.balance_counts_padding else num_real",
           "load_balancing_loss=num_real", OBJECTIVE),
    Mutant("evaluation/objective.py", "(stats.router_z_loss, config.router_z_loss_weight)",
           "(stats.router_z_loss, config.load_balancing_loss_weight)", OBJECTIVE),
    Mutant("evaluation/objective.py", 'real["decoder"] = masks.decoder_is_real(features)',
           'real["decoder"] = masks.encoder_is_real(features)', OBJECTIVE),
    # Decoding, data and comparisons.
    Mutant("decoding/beam.py", "> ended_scores[:, -1]", "> ended_scores[:, 0]", ("tests/decoding/beam_test.py",)),
    Mutant("tasks/text_to_text.py", "min(size, limit) ** (1 / temperature)", "min(size ** (1 / temperature), limit)",
           ("tests/tasks/downstream_test.py",)),
    Mutant("tasks/text_source.py", '"{key} {file} {start}"', '"{file} {start}"', ("tests/tasks/text_source_test.py",)),
    Mutant("tasks/text_source.py", '"{key} {file} {start}"', '"{key} {start}"', ("tests/tasks/text_source_test.py",)),
    Mutant("comparison/results.py", "if count > 1 and are_of_same_seeds:", "if count > 1:", RESULTS),
    Mutant("comparison/results.py", "all(run.seed == reference.seed", "any(run.seed == reference.seed", RESULTS),
    Mutant("comparison/results.py", "of_seed.get(run.seed, references[0])) for run in runs]",
           "reference) for run, reference in zip(runs, references * len(runs))]", RESULTS),
    Mutant("comparison/curves.py", "statistics.mean(losses[max(0, end - SMOOTHING):end])",
           "sum(losses[max(0, end - SMOOTHING):end]) / min(end, SMOOTHING)", ("tests/comparison/curves_test.py",)),
    Mutant("data/evaluator.py", "np.mean([np.mean(group) for group in groups.values()])",
           "np.mean([value for task in scores.values() for value in task.metrics.values()])", EVALUATOR),
    Mutant("data/evaluator.py", "np.mean([np.mean(group) for group in groups.values()])",
           "np.mean([value for group in groups.values() for value in group])", EVALUATOR),
)
