"""`python -m switch_tf`."""

import switch_tf.cli.__main__  # noqa: F401
