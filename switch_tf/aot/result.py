"""The JSON object of `switch-tf compile`: an estimate, its warnings, and predicted seconds."""

from switch_tf.aot import layout_warnings
from switch_tf.aot.advice import advice
from switch_tf.aot.estimate import Estimate, Question, needed
from switch_tf.configs import accounting

NUM_LARGEST = 8  # collectives in the list of the largest


def as_json(question: Question, answer: Estimate) -> dict:
    """Returns everything known about a step, or the compiler's message and advice if it found no room.

    "..._per_device" and "chip_bytes" are for one chip, "collectives" for a step on one chip.
    """
    config, layout, chip = question.config, question.layout, question.chip
    fits = answer.refused is None and needed(answer.memory) <= chip.memory
    result = {
        "topology": question.topology, "mesh": layout.mesh, "num_parameters": config.num_parameters,
        "layers": [config.num_encoder_layers, config.num_decoder_layers],
        "compiled_layers": [list(depth) for depth in answer.compiled],
        "fits": fits, "chip_bytes": int(chip.memory), "collectives": answer.collectives,
        "advice": [] if fits else advice(answer, config, layout, question.settings, question.batch_size, chip)}
    if answer.refused is not None:
        return {**result, "refused": answer.refused}
    return {
        **result, "bytes_per_device": {**answer.memory, "needed": needed(answer.memory)},
        "flops_per_device": answer.flops,
        "warnings": layout_warnings.find(answer.program, config, layout, question.batch_size,
                                         question.task_feature_lengths, question.settings.num_microbatches),
        "largest_collectives": [collective._asdict() for collective in sorted(
            answer.program.collectives, key=lambda collective: -collective.bytes)[:NUM_LARGEST]],
        "predicted": _predicted(question, answer)}


def _predicted(question, answer):
    """Returns seconds, tokens and utilisation.

    "counted_by" says whether operations take the compiler's cycles or, at least, what the chip's nominal rates allow.
    "layers" and "seconds_by_bytes" are for the deepest compiled model.
    """
    roofline, seconds = answer.roofline, sum(answer.parts.values())
    config, lengths = question.config, question.task_feature_lengths
    model_flops = accounting.flops_per_step(config, question.batch_size, lengths["inputs"], lengths["targets"])
    tokens = question.batch_size * (lengths["inputs"] + (0 if config.is_encoder_only else lengths["targets"]))
    return {
        "compute_seconds": roofline.compute, "memory_seconds": roofline.memory, "links_seconds": roofline.links,
        "floor_seconds": roofline.floor, "counted_by": "cycles" if question.chip.clock else "rates",
        "step_seconds": seconds, "parts": answer.parts,
        "layers": answer.schedule.layers, "seconds_by_bytes": answer.schedule.by_bytes,
        "tokens_per_second": tokens / seconds,
        "model_flops_utilization": model_flops / question.layout.num_devices / seconds / question.chip.flops}
