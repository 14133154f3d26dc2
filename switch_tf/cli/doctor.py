"""`switch-tf doctor`: checks this machine, and prints a cure for each fault."""

import argparse
import dataclasses

from switch_tf.installation import checks, machine
from switch_tf.installation.findings import PROBLEM, WARNING

EXAMPLES = r"""
switch-tf doctor
switch-tf doctor --model_dir gs://my-bucket/runs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describes the command and declares the folder to check."""
    parser.description = "Checks versions, accelerators, folders and resources of this machine."
    parser.add_argument("--model_dir", metavar="FOLDER", help="also check that runs can be kept there")


def run(arguments: argparse.Namespace) -> dict:
    """Runs every check and prints each finding at once; returns all, with `exit_status` 1 if any is a problem."""
    findings = []
    of_folder = [lambda: machine.check_model_dir(arguments.model_dir)] if arguments.model_dir else []
    for check in (*checks.ALL, *of_folder):
        for finding in check():
            findings.append(finding)
            print(f"{finding.status:8} {finding.check:20} {finding.found}", file=arguments.stream, flush=True)
            if finding.cure:
                print(f"{'':8} {'':20} cure: {finding.cure}", file=arguments.stream, flush=True)
    count = {status: sum(finding.status == status for finding in findings) for status in (PROBLEM, WARNING)}
    print(f"checks: {len(findings)}, problems: {count[PROBLEM]}, warnings: {count[WARNING]}", file=arguments.stream)
    return {"problems": count[PROBLEM], "warnings": count[WARNING],
            "checks": [dataclasses.asdict(finding) for finding in findings], "exit_status": int(count[PROBLEM] > 0)}
