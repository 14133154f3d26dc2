"""Translation from English: `wmt14_en_de`, `wmt14_en_fr` and `wmt16_en_ro`, by t5's own preprocessor."""

import functools

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, preprocessors


def _add_task(name, tfds_name, target_language):
    plain = text_to_text.plain(preprocessors.translate)
    translate = functools.partial(plain, source_language="en", target_language=target_language)
    text_to_text.add_task(name, tfds_name, [translate], [metrics.bleu])


_add_task("wmt14_en_de", "wmt14_translate/de-en:1.0.0", "de")
_add_task("wmt14_en_fr", "wmt14_translate/fr-en:1.0.0", "fr")
_add_task("wmt16_en_ro", "wmt16_translate/ro-en:1.0.0", "ro")
