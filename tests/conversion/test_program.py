"""convert.py as users type it: what is refused, in one message and with exit code 2."""

import pytest

from MaxText.conversion import request
from MaxText.errors import UserError
from tests.conversion.small_folders import random, write
from tests.programs import run as start


def test_one_conversion_and_one_mistake(tmp_path, users_environment):
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


def test_help(tmp_path, users_environment):
    done = start("convert.py", ["--help"], tmp_path, users_environment)
    assert done.returncode == 0
    assert done.stdout.startswith("usage: convert.py [grow] [CONFIG.yml] from=SOURCE")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["from=a"], "to= is missing"),
        (["to=a"], "from= is missing"),
        (["form=a", "to=b"], "from= is missing. Did you mean from= by form=?"),
        (["from=a", "tos=b"], "to= is missing. Did you mean to= by tos=?"),
        ([f"from={__file__}", "to=a"], "is a file. Name the folder of a run, or hf:FOLDER"),
        (["run", "to=a"], "run: no such option"),
        (["from=a", "to=hf:b", "--verfy"], "Did you mean --verify"),
        (["from=hf:a", "to=hf:b"], "copy the folder instead"),
        (["from=a", "to=b"], "is a run of this program already"),
        (["from=a", "to=hf:b", "dtype=float64"], "dtype=float64 is none of float32, bfloat16"),
        (["from=a", "to=hf:b", "family=bert"], "family=bert is none of gpt2"),
        (["from=a", "to=hf:b", "max_shard_size=big"], "max_shard_size=big is no size"),
        (["from=a", "to=hf:b", "query_scaling=model"], "has no effect on this conversion"),
        (["from=a", "to=maxtext:b"], "this layout is read, not written"),
        (["from=a", "to=b", "export=onnx"], "export=onnx is unknown"),
        (["from=a", "to=hf:b", "export=stablehlo"], "writes one file, but to=hf:b is a folder"),
        (["from=a", "to=b", "export=stablehlo", "length=0"], "length=0 is no number of tokens"),
        (["from=a", "to=b", "export=stablehlo", "--verify"], "neither from= nor to= is one"),
        (["from=a", "from=b", "to=c"], "from is given twice"),
        (["a.yml", "from=hf:a", "to=b"], "config.json decides"),
        (["from=a", "to=hf:b", "dtyp=float16"], "Did you mean dtype="),
        (["from=hf:a", "to=b", "familly=llama"], "no such option or key. Did you mean family=...?"),
        (["from=hf:a", "to=b", "tokeniser=c"], "Did you mean tokenizer=... or tokenizer_"),
        (
            ["from=hf:a", "to=b", "verify=true"],
            "verify=true: no such option or key. Did you mean --",
        ),
        (["from=maxtext:a", "to=b", "query_scale=c"], "Did you mean query_scaling=...?"),
        (["from=~nobody_here/a", "to=b"], "there is no user nobody_here here"),
        (["from=a", "to=hf:~nobody_here/a"], "there is no user nobody_here here"),
        ([f"from={'a' * 300}", "to=b"], "config.json cannot be read: File name too long"),
        (["from=a", "to=b", "export=stablehlo", "tokenizer=c"], "has no effect"),
        (["from=a", "to=hf:"], "names nothing new"),
    ],
)
def test_what_cannot_be_meant(arguments, message):
    with pytest.raises(UserError) as caught:
        request.read(arguments)
    assert message in str(caught.value)


def test_sizes():
    for text, size in {"5GB": 5e9, "200MB": 2e8, "1.5k": 1500, "800": 800}.items():
        asked = request.read(["from=a", "to=hf:b", f"max_shard_size={text}"])
        assert asked.max_shard_bytes == size
