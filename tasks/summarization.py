"""Summaries of news: `cnn_dailymail` (arXiv 1602.06023) and `xsum` (arXiv 1808.08745), by t5's own preprocessor.

XSum, which t5 does not have, is read from `xsum:1.1.0`; TFDS prepares it from articles that have to be fetched by hand.
"""

import functools

from switch_tf.tasks import text_to_text
from switch_tf.tasks.t5_parts import metrics, preprocessors


def _summarize(article_key, summary_key):
    plain = text_to_text.plain(preprocessors.summarize)
    return [functools.partial(plain, article_key=article_key, summary_key=summary_key)]


text_to_text.add_task("cnn_dailymail", "cnn_dailymail:3.4.0", _summarize("article", "highlights"), [metrics.rouge])
text_to_text.add_task("xsum", "xsum:1.1.0", _summarize("document", "summary"), [metrics.rouge])
