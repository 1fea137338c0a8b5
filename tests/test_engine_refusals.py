"""What the engine refuses, with which words, and in which order."""

import ast
import json
from pathlib import Path

import pytest
import torch

import offload
from offload import models
from offload.cpu import CpuDevice
from offload.models.base import Architecture
from offload.models.dense import LlamaForCausalLM
from tests.engines import CountingDevice, prefetch, uva
from tests.tiny_folder import write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


pytestmark = pytest.mark.filterwarnings("ignore:on device cpu")


@pytest.fixture
def broken(folder, tmp_path):
    """A folder in which everything is wrong that can be: each test repairs the faults that come before its own."""
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Nobody"]}))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    return tmp_path


class NoWeightsRead:
    """Fails a test as soon as a weight is read."""

    @pytest.fixture(autouse=True)
    def forbid(self, monkeypatch):
        def fail(*_):
            pytest.fail("weights were read before the refusal")

        monkeypatch.setattr("offload.assemble.load_weights", fail)


class TestOrder(NoWeightsRead):
    def repaired(self, broken, folder, *names):
        for name in names:
            (broken / name).write_bytes((folder / name).read_bytes())

    def test_the_configuration_comes_before_any_file(self, tmp_path):
        with pytest.raises(offload.OffloadConfigError, match="cpu_offload_gb: .* greater than or equal to 0"):
            offload.load(tmp_path / "nowhere", {"uva": {"cpu_offload_gb": -1}}, "cpu")

    def test_then_the_folder(self, tmp_path):
        with pytest.raises(offload.ModelLoadError, match="is no folder: give the one that holds config.json"):
            offload.load(tmp_path / "nowhere", uva(1, "nothing"), "cpu")

    def test_then_the_architecture(self, broken):
        with pytest.raises(
            offload.ModelLoadError, match='architecture "Nobody" is not known; known: .*LlamaForCausalLM'
        ):
            offload.load(broken, uva(1, "nothing"), "cpu")

    def test_then_the_plan(self, broken, folder):
        self.repaired(broken, folder, "config.json")
        with pytest.raises(
            offload.OffloadConfigError, match='nothing would be offloaded: selector "qkv_prj" .*nearest: .*qkv_proj'
        ):
            offload.load(broken, uva(1, "qkv_prj"), "cpu")

    def test_then_the_headers(self, broken, folder):
        self.repaired(broken, folder, "config.json")
        with pytest.raises(offload.ModelLoadError, match="model.safetensors .*download it again"):
            offload.load(broken, uva(1), CountingDevice(free_bytes=10))

    def test_then_whether_the_files_are_the_models(self, broken, folder):
        self.repaired(broken, folder, "config.json", "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 24}))
        with pytest.raises(offload.ModelLoadError, match='tensor ".*down_proj.weight" has shape .*config.json needs'):
            offload.load(broken, uva(1), CountingDevice(free_bytes=10))

    def test_then_the_device_and_its_memory(self, broken, folder):
        self.repaired(broken, folder, "config.json", "model.safetensors")
        with pytest.raises(offload.ModelLoadError, match='no device "cpu:3" here: choose one of cpu'):
            offload.load(broken, uva(1), "cpu:3")

        class FullDevice(CpuDevice):
            def host_memory(self):
                return type(super().host_memory())(10, 2**30)

        with pytest.raises(offload.ModelLoadError, match="not enough memory on the host: needs .* has .* GiB"):
            offload.load(broken, uva(1), FullDevice())

    def test_then_the_tokenizer(self, broken, folder):
        self.repaired(broken, folder, "config.json", "model.safetensors")
        with pytest.raises(offload.ModelLoadError, match="tokenizer.json cannot be read .*: download it again"):
            offload.load(broken, None, "cpu")
        (broken / "tokenizer.json").unlink()
        with pytest.raises(offload.ModelLoadError, match="has no tokenizer.json: text cannot be read without it"):
            offload.load(broken, None, "cpu", needs_text=True)

    @pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
    @pytest.mark.parametrize("ends", ["</s>", [2, [3]], 2.5])
    def test_then_the_end_tokens(self, broken, folder, file, ends):
        self.repaired(broken, folder, "config.json", "model.safetensors")
        (broken / "tokenizer.json").unlink()
        described = json.loads((broken / file).read_text()) if (broken / file).is_file() else {}
        (broken / file).write_text(json.dumps({**described, "eos_token_id": ends}))
        with pytest.raises(offload.ModelLoadError, match=f"^{file}: eos_token_id is .*: it must be a token or a list"):
            offload.load(broken, None, "cpu")


class Unsupported(LlamaForCausalLM):
    """An architecture that makes no promise."""

    supports_weight_offload = False


class Deaf(LlamaForCausalLM):
    """Claims to support offloading, and fills weights of its own instead of asking where they go."""

    def load_weights(self, checkpoint, destination):
        for name, place in self.checkpoint_slices().items():
            checkpoint.read_into(name, torch.empty(place.shape))


class Forgetful(LlamaForCausalLM):
    """Asks for every weight but one."""

    def load_weights(self, checkpoint, destination):
        slices = self.checkpoint_slices
        self.checkpoint_slices = lambda: {k: v for k, v in slices().items() if k != "model.norm.weight"}
        super().load_weights(checkpoint, destination)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(models, "_REGISTRY", dict(models._REGISTRY))
    for cls in (Unsupported, Deaf, Forgetful):
        models.register(cls)


class TestSupport:
    def test_support_is_off_unless_a_class_sets_it(self):
        assert Architecture.supports_weight_offload is False

    @pytest.mark.parametrize("config", [uva(1), prefetch(2, 1, 1)], ids=["uva", "prefetch"])
    def test_an_architecture_without_support_is_refused_before_any_weight(
        self, config, registered, tmp_path, monkeypatch
    ):
        monkeypatch.setattr("offload.assemble.open_source", lambda *_: pytest.fail("files were opened"))
        write_model(tmp_path, architectures=["Unsupported"])
        with pytest.raises(offload.ModelLoadError, match="Unsupported does not support weight offloading: remove"):
            offload.load(tmp_path, config, "cpu")

    def test_it_runs_without_offload(self, registered, tmp_path):
        write_model(tmp_path, architectures=["Unsupported"])
        with offload.load(tmp_path, {"uva": {"cpu_offload_gb": 0}}, "cpu") as engine:
            assert len(engine.generate([[1]], 2)[0].token_ids) == 2

    def test_a_loader_that_asks_for_nothing_is_a_defect(self, registered, tmp_path):
        write_model(tmp_path, architectures=["Deaf"])
        with pytest.raises(offload.ModelLoadError, match="a defect of Deaf.load_weights, not of the checkpoint"):
            offload.load(tmp_path, uva(1), "cpu")

    def test_a_loader_that_leaves_one_out_is_a_defect(self, registered, tmp_path):
        write_model(tmp_path, architectures=["Forgetful"])
        with pytest.raises(offload.ModelLoadError, match='"model.norm.weight".*a defect of Forgetful.load_weights'):
            offload.load(tmp_path, uva(1), "cpu")


def test_an_integrated_gpu_is_refused(folder):
    class Integrated(CpuDevice):
        name = "cuda:0"
        unified = True

    with pytest.raises(offload.ModelLoadError, match="cuda:0 is an integrated GPU: host and device are one memory"):
        offload.load(folder, uva(1), Integrated())
    offload.load(folder, None, Integrated()).close()


@pytest.mark.parametrize("max_context", [0, -1, True, 3.5, 100_001])
def test_a_context_that_the_model_was_not_made_for(max_context, folder):
    with pytest.raises(ValueError, match="max_context is .*: give a number of tokens from 1 to 100000"):
        offload.load(folder, None, "cpu", max_context=max_context)


def test_a_device_with_memory_needs_weights(folder):
    with pytest.raises(offload.ModelLoadError, match='load_format "meta" reads no weights, and cpu would compute'):
        offload.load(folder, None, CpuDevice(), load_format="meta")
    with pytest.raises(offload.ModelLoadError, match="cpu cannot run without weights .*: use virtual:NAME"):
        offload.load(folder, None, "cpu", load_format="meta")


def test_an_unknown_load_format(folder):
    with pytest.raises(ValueError, match='no load format "gguf": choose one of safetensors, dummy, meta'):
        offload.load(folder, None, "cpu", load_format="gguf")


@pytest.fixture(scope="module")
def engine(folder):
    with offload.load(folder, None, "cpu", max_context=20) as engine:
        yield engine


class TestGenerate:
    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("hello", 'prompts is "hello": give a list of texts or of token lists'),
            ([1, 2], "prompt 0 is 1: give a text or a list of tokens"),
            ([b"hi"], "prompt 0 is \"b'hi'\": give a text or a list of tokens"),
            ([""], "prompt 0 is empty: give at least one token"),
            ([[1], []], "prompt 1 is empty: give at least one token"),
            ([[1, 257]], "prompt 0: 257 is no token of the model: give integers below 257"),
            ([[-1]], "prompt 0: -1 is no token of the model"),
            ([[True]], "prompt 0: true is no token of the model"),
            ([[1.5]], "prompt 0: 1.5 is no token of the model"),
            ([[1], [1] * 18], "prompt 1 has 18 tokens and 3 more are asked for, but the context is 20: shorten"),
        ],
    )
    def test_unusable_prompts(self, prompts, message, engine):
        with pytest.raises(ValueError) as refusal:
            engine.generate(prompts, 3)
        assert message in str(refusal.value)

    @pytest.mark.parametrize("count", [0, -1, 2.0, True, "3"])
    def test_unusable_numbers_of_tokens(self, count, engine):
        with pytest.raises(ValueError, match="max_new_tokens is .*: give a positive integer"):
            engine.generate([[1]], count)

    @pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf"), 1e-40, "0.7", None])
    def test_unusable_temperatures(self, temperature, engine):
        with pytest.raises(ValueError, match="temperature is .*: give 0 for the likeliest token, or a positive number"):
            engine.generate([[1]], 1, temperature=temperature)

    @pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True, "3"])
    def test_unusable_seeds(self, seed, engine):
        with pytest.raises(ValueError, match="seed is .*: give an integer from 0 to 2\\^64 - 1"):
            engine.generate([[1]], 1, temperature=1.0, seed=seed)

    def test_text_without_a_tokenizer(self, folder, tmp_path):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).write_bytes((folder / name).read_bytes())
        with offload.load(tmp_path, None, "cpu") as engine:
            for ask in (lambda: engine.generate(["hello"], 1), lambda: engine.chat_prompt("hello")):
                with pytest.raises(ValueError, match="has no tokenizer.json: give token lists, or add the file"):
                    ask()
            assert engine.generate([[1]], 1)[0].text is None

    def test_a_cache_that_does_not_fit_is_refused_before_it_is_allocated(self, folder):
        device = CountingDevice()
        with offload.load(folder, None, device) as engine:
            expected = engine.generate([[1]], 4)
            device.free_bytes = 1000
            device.allocate_device = lambda nbytes: pytest.fail("allocated")
            with pytest.raises(offload.ModelLoadError) as refusal:
                engine.generate([[1, 2, 3]] * 2, 50)
            del device.allocate_device
            device.free_bytes = None
            assert engine.generate([[1]], 4) == expected
        assert "not enough memory on cpu for the key-value cache of 2 x 53 tokens: needs " in str(refusal.value)
        assert "use fewer prompts or a shorter context" in str(refusal.value)


def test_data_crosses_to_python_through_the_device_alone():
    root = Path(offload.__file__).parent
    files = ["engine.py", "answers.py", "decoding.py", "sampling.py", "kv_cache.py", "assemble.py"]
    paths = [root / name for name in files] + sorted((root / "models").glob("*.py"))
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in {"tolist", "item", "cpu", "numpy", "cuda", "data_ptr"}, f"{path}:{node.lineno}"
