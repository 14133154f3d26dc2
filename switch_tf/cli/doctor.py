"""`switch-tf doctor`: checks this machine, and prints a cure for each fault."""

from argparse import Namespace

from switch_tf.cli.parser import option
from switch_tf.installation.doctor import PROBLEM, WARNING, check_all

DOCTOR_EXAMPLES = r"""
switch-tf doctor
switch-tf doctor --model_dir gs://my-bucket/runs
"""
DOCTOR_ARGUMENTS = (
    "Checks versions, accelerators, folders and resources of this machine.",
    option("--model_dir", "also check that runs can be kept there", "FOLDER"),
)


def run_doctor(arguments: Namespace) -> dict:
    """Prints each finding at once. Returns all, with `exit_status` 1 if any is a problem."""
    findings = []
    for finding in check_all(arguments.model_dir):
        check, result, cure, _ = finding
        findings.append({"check": check, "status": finding.status, "found": result, "cure": cure})
        print(f"{finding.status:8} {check:20} {result}", flush=True)
        if cure:
            print(f"{'':8} {'':20} cure: {cure}", flush=True)
    problems, warnings = (sum(finding["status"] == status for finding in findings) for status in (PROBLEM, WARNING))
    print(f"checks: {len(findings)}, problems: {problems}, warnings: {warnings}")
    return {"problems": problems, "warnings": warnings, "checks": findings, "exit_status": int(problems > 0)}
