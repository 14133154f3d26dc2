"""Checks that the tests notice planted mistakes: applies each mutant to a copy of the tree and runs its tests.

`make mutants` runs it. A mutant's own tests come first, then its slow ones, and the whole suite only if all of those
pass. Results are kept in runs/mutants.json, so an interrupted run resumes; remove the file to start over.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
RESULTS = ROOT / "runs" / "mutants.json"
LONGEST = 1800  # seconds for a mutant's own tests; one that hangs has been noticed
SURVIVED = "survived"
NO_TESTS = 5  # pytest's status if no test was selected


def read_mutants():
    """Returns the mutants of mutants.py; exits if one does not apply."""
    spec = importlib.util.spec_from_file_location("mutants", pathlib.Path(__file__).with_name("mutants.py"))
    module = sys.modules["mutants"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    wrong = [f"{mutant.path} holds {count} times, not once: {mutant.old}" for mutant in module.MUTANTS
             if (count := (ROOT / mutant.path).read_text().count(mutant.old)) != 1]
    if wrong:
        sys.exit("\n".join(["These mutants no longer apply; rewrite them in tests/mutants/mutants.py:", *wrong]))
    return module.MUTANTS


def key(mutant):
    return f"{mutant.file}: {mutant.old} -> {mutant.new}"


def copy_tree(folder):
    """Copies the working tree without the files that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def run_tests(folder, tests, log, marked="not slow and not exhaustive"):
    """Runs tests of the copy; returns None if all pass, else the first failure or the signal that ended them.

    They run in a fork of this process, which has imported TensorFlow and Keras already.
    """
    child = os.fork()
    if not child:
        signal.alarm(LONGEST if tests != ("tests",) else 8 * LONGEST)
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        import pytest

        import switch_tf

        # An editable installation would take switch_tf.tasks from the tree that it was made for.
        switch_tf.__path__.append(str(folder))
        for name in ("switch_tf", "switch_tf.tasks"):
            origin = importlib.util.find_spec(name).origin
            assert pathlib.Path(origin).is_relative_to(folder), origin
        # tests/mutants is left out: in a copy with a mutant, that mutant no longer applies.
        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--ignore=tests/mutants", "-m", marked, *tests]))
    _, status = os.waitpid(child, 0)
    text = log.read_text(errors="replace")
    if os.WIFSIGNALED(status):
        return f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 2, NO_TESTS):
        sys.exit(f"pytest ended with status {code}:\n{text[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return None if code in (0, NO_TESTS) else failed[1] if failed else "an error while tests were collected"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--own_tests_only", action="store_true",
                        help="do not run the whole suite if a mutant's own tests pass; report it as survived")
    arguments = parser.parse_args()
    mutants = read_mutants()
    RESULTS.parent.mkdir(exist_ok=True)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = {name: result for name, result in results.items() if name in {key(mutant) for mutant in mutants}}
    sys.dont_write_bytecode = True  # a file that changes twice within a second would be taken from its cache
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    import hypothesis
    import keras
    import tensorflow

    assert {hypothesis, keras, tensorflow}  # imported for the children
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary).resolve() / "tree"
        copy_tree(folder)
        log = folder.with_name("log")
        passing = set()
        for mutant in mutants:
            if key(mutant) in results:
                continue
            if mutant.tests not in passing and (failed := run_tests(folder, mutant.tests, log)) is not None:
                sys.exit(f"{failed} fails without any mutant, so the results would mean nothing:\n"
                         f"{log.read_text()[-3000:]}")
            passing.add(mutant.tests)
            file, begin = folder / mutant.path, time.monotonic()
            original = file.read_text()
            file.write_text(original.replace(mutant.old, mutant.new))
            noticed = run_tests(folder, mutant.tests, log)
            if noticed is None and not mutant.survives:
                noticed = run_tests(folder, mutant.tests, log, "slow")
            if noticed is None and not mutant.survives and not arguments.own_tests_only:
                noticed = run_tests(folder, ("tests",), log)
            file.write_text(original)
            results[key(mutant)] = {"noticed_by": noticed or SURVIVED, "seconds": round(time.monotonic() - begin)}
            RESULTS.write_text(json.dumps(results, indent=1))
            print(f"{' '.join(key(mutant).split())[:100]:100s}  {noticed or SURVIVED}", flush=True)
    survivors = [mutant for mutant in mutants if results[key(mutant)]["noticed_by"] == SURVIVED]
    unexplained = [mutant for mutant in survivors if not mutant.survives]
    print(f"{len(mutants)} mutants, {len(survivors)} survived, {len(unexplained)} of them unexplained.")
    for mutant in survivors:
        print(f"  {key(mutant)}\n    {mutant.survives or 'UNEXPLAINED'}")
    sys.exit(bool(unexplained))


if __name__ == "__main__":
    main()
