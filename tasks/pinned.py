"""What corpora ask of the installed distributions that they are made of: the pinned versions, as published."""

import hashlib
from collections.abc import Mapping
from importlib import metadata

# One file in this many belongs to the validation split.
_VALIDATION_MODULUS = 20


def check_versions(corpus: str, distributions: Mapping[str, tuple[str, str]]) -> None:
    """Refuses an environment that has not the pinned version of each distribution.

    Args:
        corpus: str, the name of what is made of them.
        distributions: distribution -> its version and the digest of its text.

    Raises:
        RuntimeError: with those that are missing or others.
    """
    wrong = []
    for name, (wanted, _) in distributions.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = "not installed"
        if found != wanted:
            wrong.append(f"{name} (found {found}, expected {wanted})")
    if wrong:
        raise RuntimeError(
            f"The {corpus} is made from pinned versions, which this environment does not have: {', '.join(wrong)}; "
            "run: pip install --no-deps -r requirements.txt"
        )


def check_digests(corpus: str, distributions: Mapping[str, tuple[str, str]], texts: Mapping[str, bytes]) -> None:
    """Refuses files that are not those of the wheels.

    Args:
        corpus: str, the name of what is made of them.
        distributions: distribution -> its version and the digest of its text.
        texts: distribution -> text that was read.

    Raises:
        RuntimeError: with the command that mends it.
    """
    changed = [name for name, text in texts.items() if digest(text) != distributions[name][1]]
    if changed:
        wanted = " ".join(f"{name}=={distributions[name][0]}" for name in changed)
        raise RuntimeError(
            f"The {corpus} needs {' and '.join(wanted.split())} as published, but the installed files differ "
            f"(edited or incomplete); run: pip install --no-deps --force-reinstall {wanted}"
        )


def split_of(file: str) -> str:
    """Returns "train" or "validation", always the same for a file's name."""
    return "train" if int(hashlib.sha256(file.encode()).hexdigest(), 16) % _VALIDATION_MODULUS else "validation"


def digest(text: bytes) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(text).hexdigest()[:16]
