"""`c4_span_corruption`: T5's objective on C4, the data that the T5 and Switch papers pretrain on.

The data are `c4/en:3.1.0`, the version that tensorflow-datasets 4.9.10 can prepare.
"""

import seqio

from switch_tf.tasks import prepared_tfds, preprocessors, vocabularies

seqio.TaskRegistry.add(
    "c4_span_corruption",
    source=prepared_tfds.PreparedTfdsSource("c4/en:3.1.0", {"train": "train", "validation": "validation"}),
    preprocessors=preprocessors.pretraining(preprocessors.span_corruption),
    output_features=preprocessors.output_features(vocabularies.t5()),
    metric_fns=[],
)
