"""All checks of the doctor, in order."""

from switch_tf.installation import machine, packages, tpu

ALL = (packages.check_python, packages.check_versions, packages.check_double_distributions,
       packages.check_requirements, packages.check_variables, machine.check_tensorboard, machine.check_accelerators,
       machine.check_pjrt, tpu.check_tpu, machine.check_data, machine.check_folders, machine.check_machine)
