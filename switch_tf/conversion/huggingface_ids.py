"""Special ids of a Hugging Face folder, used as in transformers or refused by their key.

They come from generation_config.json if it exists, else from config.json. The end of a sequence may be any id, several,
or null for none. Padding and the first token of the decoder must be 0, as everywhere in T5: models here mask token 0,
and data are padded and shifted with it.
"""

import warnings

from switch_tf import checks
from switch_tf.refusals import Refusal

_PAD, _END, _START, _BEGIN = "pad_token_id", "eos_token_id", "decoder_start_token_id", "bos_token_id"
_FORCED = ("forced_bos_token_id", "forced_eos_token_id")
_DEFAULT_END = 1  # transformers' for a config.json without the key


def end_id(values: dict, generation: dict | None) -> int | tuple[int, ...]:
    """Returns `SwitchConfig.end_id`, after a check of the other special ids.

    Args:
        values: dict. Content of config.json.
        generation: dict or None. Content of generation_config.json, None if there is no such file.

    Raises:
        Refusal: switch_tf cannot use an id; names the file, the key and the value.
    """
    for file, content in (("config.json", values), ("generation_config.json", generation or {})):
        for key in (_PAD, _START):
            # null in generation_config.json, or a missing key, leaves the choice to the caller of generate.
            may_be_null = key not in content or (file, key) != ("config.json", _PAD)
            _check_zero(file, key, content.get(key), may_be_null)
        for key in _FORCED:
            if content.get(key) is not None:
                raise Refusal(f"{key} in {file} is {checks.shown(content[key])}, and switch_tf forces no token while "
                              "it decodes; remove the key to read the model without it.")
    file, content = ("config.json", values) if generation is None else ("generation_config.json", generation)
    if content.get(_START) is None:
        _check_zero(file, _BEGIN, content.get(_BEGIN), may_be_null=True)
    if generation is not None and _END not in generation:
        warnings.warn(f"generation_config.json has no {_END}, so sequences never end before their greatest length, as "
                      "in transformers; add the key, or call generate with end_id.", stacklevel=2)
        return ()
    return _end(file, content.get(_END, _DEFAULT_END))


def _check_zero(file, key, value, may_be_null):
    if value is None and may_be_null:
        return
    if type(value) is not int or value != 0:
        raise Refusal(f"{key} in {file} must be 0, not {checks.shown(value)}: switch_tf masks token 0 as padding "
                      "and starts every decoder with it, as T5 does, so such a model would compute other numbers "
                      "here.")


def _end(file, value):
    if value is None:
        return ()
    ends = checks.ids(f"{_END} in {file}", value)
    if ends == () or 0 in (ends if isinstance(ends, tuple) else (ends,)):
        raise Refusal(f"{_END} in {file} must be the id of an end of sequence, several, or null for none, not "
                      f"{checks.shown(value)}; 0 is the padding.")
    return ends


def keys(end: int | tuple[int, ...]) -> dict:
    """Returns the keys of config.json for special ids, given `SwitchConfig.end_id`."""
    ends = list(end) if isinstance(end, tuple) else end
    return {_PAD: 0, _START: 0, _END: None if ends == [] else ends}
