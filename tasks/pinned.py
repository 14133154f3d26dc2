"""The installed distributions of the corpora, compared with the pinned versions."""

import hashlib
from collections.abc import Mapping

from switch_tf import environment
from switch_tf.refusals import Refusal

# One file in this many belongs to the validation split.
_VALIDATION_MODULUS = 20


def installed(distributions: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """Returns name -> version of the distributions that are installed."""
    return {name: version for name in distributions if (version := environment.installed_version(name))}


def describe_difference(corpus: str, distributions: Mapping[str, tuple[str, str]]) -> str:
    """Returns a sentence about installed versions that are not the pinned ones, "" if there are none.

    Args:
        corpus: str. Name of the corpus.
        distributions: Distribution -> its pinned version and the digest of its text.
    """
    found = installed(distributions)
    others = [f"{name} {found.get(name, 'is not installed')} (pinned: {version})"
              for name, (version, _) in distributions.items() if found.get(name) != version]
    if not others:
        return ""
    return (f"The {corpus} is made from the installed versions of its {len(distributions)} distributions, and these "
            f"are not the pinned ones: {', '.join(others)}. Losses cannot be compared with those of another "
            "environment; for the pinned text: pip install --no-deps -r requirements.txt")


def check_digests(corpus: str, distributions: Mapping[str, tuple[str, str]], texts: Mapping[str, bytes]) -> None:
    """Refuses files of pinned versions that differ from those of the wheels.

    Args:
        corpus: str. Name of the corpus.
        distributions: Distribution -> its pinned version and the digest of its text.
        texts: Distribution -> text that was read.
    """
    found = installed(distributions)
    changed = [name for name, text in texts.items()
               if found.get(name) == distributions[name][0] and digest(text) != distributions[name][1]]
    if changed:
        wanted = " ".join(f"{name}=={distributions[name][0]}" for name in changed)
        raise Refusal(
            f"The {corpus} needs {' and '.join(wanted.split())} as published, but the installed files differ "
            f"(edited or incomplete); run: pip install --no-deps --force-reinstall {wanted}"
        )


def split_of(file: str) -> str:
    """Returns "train" or "validation", depending only on the name of the file."""
    return "train" if int(hashlib.sha256(file.encode()).hexdigest(), 16) % _VALIDATION_MODULUS else "validation"


def digest(text: bytes) -> str:
    """Returns the first 16 hexadecimal digits of the SHA-256."""
    return hashlib.sha256(text).hexdigest()[:16]
