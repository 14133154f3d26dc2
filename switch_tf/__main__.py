"""`python -m switch_tf`."""

import sys

from switch_tf.cli.main import main

sys.exit(main())
