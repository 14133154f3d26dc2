"""The parts of t5 that downstream tasks use. t5 is installed separately (docs/install.md)."""

from switch_tf import environment
from switch_tf.refusals import Refusal

try:
    from t5.data import glue_utils, postprocessors, preprocessors
    from t5.evaluation import metrics
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "t5":
        raise
    raise Refusal("This task uses the preprocessors and metrics of t5, which is not installed; run "
                  f"`{environment.install_t5()}`") from None

__all__ = ["glue_utils", "metrics", "postprocessors", "preprocessors"]
