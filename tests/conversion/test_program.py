"""convert.py as users type it: what is refused, in one message and with exit code 2."""

import pytest

from MaxText.conversion.request import parse_arguments
from MaxText.errors import UserError
from tests.conversion.small_folders import random, write
from tests.house.sources import REPOSITORY
from tests.programs import run as start


def test_help_a_conversion_and_a_mistake(tmp_path, users_environment):
    done = start("convert.py", ["--help"], tmp_path, users_environment)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: convert.py ")
    write(tmp_path / "hf", *random("llama"))
    done = start("convert.py", ["from=hf:hf", "to=run"], tmp_path, users_environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "python MaxText/train.py run/config.yml load_parameters_path=run" in done.stdout
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"12345678")
    done = start("convert.py", ["from=hf:hf", "to=other"], tmp_path, users_environment)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


@pytest.mark.parametrize(
    "line",
    [
        "to=a",
        "from=a tos=b",
        "from=pyproject.toml to=a",
        "run to=a",
        "grwo from=a to=b",
        "from=a to=hf:b --verfy",
        "from=hf:a to=hf:b",
        "from=a to=b",
        "from=a from=b to=c",
        "from=a to=hf:b dtype=float64",
        "from=a to=hf:b family=bert",
        "from=a to=maxtext:b",
        "from=a to=hf:b max_shard_size=big",
        "from=a to=hf:b query_scaling=model",
        "from=a to=b export=onnx",
        "from=a to=hf:b export=stablehlo",
        "from=a to=b export=stablehlo length=0",
        "from=a to=b export=stablehlo --verify",
        "a.yml from=hf:a to=b",
        "from=hf:a to=b tokenzier=c",
        "from=maxtext:a to=b query_scale=c",
        f"from={'a' * 300} to=b",
        "grow from=maxtext:a to=b slot_num=2",
    ],
    ids=lambda line: line[:60],
)
def test_command_lines_that_are_refused(line, told, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(UserError) as caught:
        parse_arguments(line.split())
    told(caught.value)


def test_sizes():
    for text, size in {"5GB": 5e9, "200MB": 2e8, "1.5k": 1500, "800": 800}.items():
        asked = parse_arguments(["from=a", "to=hf:b", f"max_shard_size={text}"])
        assert asked.max_shard_size == size
