"""`switch-tf doctor`: is this machine set up right? Each line is what was found; each fault comes with its cure."""

import dataclasses
import sys

from switch_tf.installation import machine, packages
from switch_tf.installation.findings import PROBLEM, WARNING

EXAMPLES = r"""
switch-tf doctor
switch-tf doctor --json
"""

CHECKS = (packages.check_python, packages.check_versions, packages.check_double_distributions,
          packages.check_requirements, machine.check_tensorboard, machine.check_accelerators, machine.check_folders,
          machine.check_machine)


def add_arguments(parser) -> None:
    """Declares the arguments of the command: none of its own."""
    parser.description = "Checks versions, accelerators, folders and resources of this machine."


def run(arguments) -> dict:
    """Runs every check, printing each finding as soon as it is known.

    Returns: the JSON object; its `exit_status` is 1 if anything is a problem.
    """
    stream = sys.stderr if arguments.json else sys.stdout
    findings = []
    for check in CHECKS:
        for finding in check():
            findings.append(finding)
            print(f"{finding.status:8} {finding.check:20} {finding.found}", file=stream)
            if finding.cure:
                print(f"{'':8} {'':20} cure: {finding.cure}", file=stream)
            stream.flush()
    count = {status: sum(finding.status == status for finding in findings) for status in (PROBLEM, WARNING)}
    print(f"checks: {len(findings)}, problems: {count[PROBLEM]}, warnings: {count[WARNING]}", file=stream)
    return {
        "problems": count[PROBLEM],
        "warnings": count[WARNING],
        "checks": [dataclasses.asdict(finding) for finding in findings],
        "exit_status": int(count[PROBLEM] > 0),
    }
