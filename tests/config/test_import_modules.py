"""`import_modules`: mistakes of a module are one message; its keys are keys like any other."""

import sys

import pytest

from MaxText import exit_codes
from MaxText.checkpointing import checkpoint_files
from MaxText.config import import_modules, registry
from MaxText.config.command_line import parse
from MaxText.config.keys import Section, key
from MaxText.config.loading import load_config
from MaxText.config.part_sections import Parts
from MaxText.config.problems import ConfigurationError
from MaxText.config.schema import flatten, unflatten
from MaxText.config.serialization import resolved_yaml
from MaxText.config.sources import IMPORTED
from MaxText.inference.checkpoint_config import load
from tests.programs import run

HEAD = """
from MaxText.config.keys import Section, key
from MaxText.layers.part import Mixer, register
"""
PART = (
    HEAD
    + """
class Keys(Section):
    "Mine."
    my_width: int = key(3, "How wide it is.", ge=1)


@register("mixer", "mine", keys=Keys)
class Mine(Mixer):
    "The input, once more."

    def __init__(self, keys, init, rngs):
        pass

    def __call__(self, x_BTD, context):
        return x_BTD, {}
"""
)
KEYS = "class Keys(Section):\n    'Mine.'\n    "
REGISTER = "@register('mixer', 'mine', keys=Keys)\nclass Mine(Mixer): pass\n"
# What is wrong -> (the module, words of the message, the line it names).
BROKEN = {
    "syntax": ("def f(:\n", "SyntaxError: invalid syntax", 1),
    "exception": ("\n\nraise OSError('no disk')\n", "OSError: no disk", 3),
    "exception in a library": ("import json\njson.loads('{')\n", "JSONDecodeError: ", 2),
    "exit": ("import sys\nsys.exit(0)\n", "SystemExit: 0", 2),
    "name taken by itself": (
        PART + "register('mixer', 'mine')(Mine)\n",
        "mixer 'mine' is taken: registered at",
        PART.count("\n") + 1,
    ),
    "name of a built-in part": (
        HEAD + "register('optimizer', 'adamw')(print)\n",
        "optimizer 'adamw' is taken: built in",
        4,
    ),
    "key taken": (
        HEAD + KEYS + "steps: int = key(3, 'Steps.')\n" + REGISTER,
        "mixer 'mine': there is a key 'steps' in run",
        7,
    ),
    **{
        f"key of another meaning: {name}": (
            HEAD + KEYS + f"{name}: int = key(3, 'Mine.')\n" + REGISTER,
            f"mixer 'mine': a key cannot be called '{name}': it is {words}",
            7,
        )
        for name, words in (
            ("epoch", "another name of num_epoch"),
            ("n_layer", "a key of another program"),
            ("fused_qkv", "a key of another program"),
            ("sa_size", "a key of another program"),
        )
    },
    "no key()": (
        HEAD + KEYS + "wide: int = 3\n" + REGISTER,
        "key 'wide' is not declared with key(...)",
        7,
    ),
    "keys of no section": (
        HEAD + "register('mixer', 'mine', keys=dict)(Mixer)\n",
        "derived from Section",
        4,
    ),
    "bad characters": (
        HEAD + "register('mixer', 'My-Mixer')(Mixer)\n",
        "mixer 'My-Mixer': a name is a-z, 0-9 and _",
        4,
    ),
    "keys without a title": (
        HEAD + KEYS.replace("'Mine.'", "my_width: int = key(3, 'How wide.')") + "\n" + REGISTER,
        "mixer 'mine': Keys has no docstring",
        7,
    ),
    "unknown kind": (
        HEAD + "register('mixture', 'mine')(Mixer)\n",
        "unknown kind of part 'mixture'",
        4,
    ),
}


pytestmark = pytest.mark.usefixtures("own_modules")


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(PART)
    return "import_modules=mine.py"


@pytest.fixture
def answer(capsys):
    def answer(*words, code=0):
        with pytest.raises(SystemExit) as caught:
            parse("train.py", words, "Trains.")
        assert caught.value.code == code
        return "".join(capsys.readouterr())

    return answer


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("by", ["file", "module"])
def test_a_broken_module_is_one_problem(name, by, tmp_path, answer):
    text, words, line = BROKEN[name]
    module = f"broken_{list(BROKEN).index(name)}"
    (tmp_path / f"{module}.py").write_text(text)
    given = f"{module}.py" if by == "file" else module
    before = registry.registrations()
    message = answer("mixer=mine", "my_width=5", f"import_modules={given}", code=2)
    assert message.startswith(
        f"error: 1 problem in the configuration\n\n  1. import_modules: {given}"
    )
    assert words in message
    assert f"{module}.py:{line}" in message
    assert f"command line, import_modules={given}" in message
    assert registry.registrations() == before


@pytest.mark.parametrize("given", ["nowhere.py", "nowhere_module"])
def test_a_module_that_is_not_there(given, answer):
    message = answer(f"import_modules={given}", "mixer=mine", code=2)
    assert message.startswith("error: 1 problem")
    assert given in message


def test_its_keys_are_keys(mine, answer, monkeypatch):
    help = answer("--help", "my_width", mine)
    assert "read by:  model.parts.mixer.mine" in help
    assert "How wide it is." in help
    assert "set by: command line" in answer("--why", "my_width", mine, "my_width=7")
    assert "\nmy_width: 7  # command line\n" in answer("--show-config", mine, "my_width=7")
    assert "  my_width=3\n" in answer("--help", mine)
    assert "nearest:  my_width" in answer(mine, "my_witdh=7", code=2)
    assert "nearest:  mine" in answer(mine, "mixer=mime", code=2)
    assert "my_width: 0 is not >= 1" in answer(mine, "my_width=0", code=2)
    monkeypatch.setenv("M_MY_WIDTH", "9")
    monkeypatch.setenv("M_IMPORT_MODULES", "mine.py")
    assert "my_width=9\n  set by: environment" in answer("--why", "my_width")


def test_its_keys_may_have_validators(tmp_path, answer):
    (tmp_path / "mine.py").write_text(
        "from typing import Annotated\n"
        "from pydantic import AfterValidator\n"
        "def even(number):\n"
        "    if number % 2:\n"
        "        raise ValueError('is odd')\n"
        "    return number\n"
        + PART.replace("my_width: int", "my_width: Annotated[int, AfterValidator(even)]").replace(
            "key(3", "key(4"
        )
    )
    words = ("import_modules=mine.py", "mixer=mine")
    assert "\nmy_width: 6  # command line\n" in answer("--show-config", *words, "my_width=6")
    assert "my_width: 7 is odd\n" in answer(*words, "my_width=7", code=2)
    assert "my_width: 0 is not >= 1\n" in answer(*words, "my_width=0", code=2)


def test_without_the_module_they_are_unknown(answer):
    assert "my_width: unknown key" in answer("--why", "my_width", code=2)
    assert "mixer: 'mine' is not among the choices" in answer("mixer=mine", code=2)


def test_a_file_next_to_the_config_is_named_from_the_current_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(PART)
    (tmp_path / "sub" / "mine.yml").write_text("import_modules: [mine.py]\nmixer: mine\n")
    assert load_config("sub/mine.yml").run.import_modules == ("sub/mine.py",)


def test_one_name_in_two_kinds(tmp_path):
    second = PART.replace(HEAD, "from MaxText.layers.part import FeedForward\n")
    for old, new in (
        ("Mixer", "FeedForward"),
        ("'mixer'", ""),
        ("my_width", "my_height"),
        ('"mixer"', '"feed_forward"'),
        ("Keys", "More"),
    ):
        second = second.replace(old, new)
    (tmp_path / "both.py").write_text(PART + second)
    given = {"mixer": "mine", "feed_forward_type": "mine", "my_width": 8, "my_height": 9}
    config = load_config(import_modules=["both.py"], **given)
    assert given.items() <= flatten(config).items()
    assert flatten(unflatten(flatten(config))) == flatten(config)
    section = config.model
    assert type(section).model_validate_json(section.model_dump_json()) == section


def test_values_of_its_keys_survive_a_copy_as_json(mine):
    section = load([mine, "my_width=8"]).config.model
    assert type(section).model_validate_json(section.model_dump_json()) == section


def test_a_file_that_changed_is_imported_again(mine, tmp_path):
    assert load([mine]).config.model.parts.named("mixer.mine").my_width == 3
    (tmp_path / "mine.py").write_text(PART.replace("key(3", "key(4"))
    assert load([mine]).config.model.parts.named("mixer.mine").my_width == 4


@pytest.mark.parametrize("name", ["mine.py", "my_module"])
def test_a_saved_configuration_warns_of_a_changed_source(name, mine, tmp_path, capsys):
    file = tmp_path / (name if name.endswith(".py") else f"{name}.py")
    file.write_text(PART)
    config = load_config(import_modules=[name], mixer="mine")
    (tmp_path / "saved.yml").write_text(resolved_yaml(config))
    assert load_config("saved.yml") == config
    assert "changed" not in capsys.readouterr().err
    file.write_text(PART.replace("The input", "THE INPUT").replace("key(3", "key(5"))
    assert load_config(import_modules=[name]).model.parts.named("mixer.mine").my_width == 5
    load_config("saved.yml")
    warning = f"warning: {name} has changed since the configuration was saved\n"
    assert capsys.readouterr().err == warning


def test_two_files_of_one_name(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        text = PART.replace("mine", f"mine_{folder}").replace("my_width", f"width_{folder}")
        (tmp_path / folder / "parts.py").write_text(text)
    names, before = ["a/parts.py", "b/parts.py"], registry.registrations()
    load_config(import_modules=names, mixer="mine_a")
    modules = {registry.lookup("mixer", f"mine_{folder}").__module__ for folder in "ab"}
    assert len(modules & sys.modules.keys()) == 2
    import_modules.forget(before)
    load_config(import_modules=names[:1])
    with pytest.raises(ConfigurationError, match=r"parts of b/parts.py"):
        import_modules.check_named({"import_modules": names}, "here")


TINY = [
    "mixer=mine",
    "dataset_type=synthetic",
    "steps=1",
    "run_name=run",
    "base_emb_dim=16",
    "base_num_query_heads=2",
    "base_num_kv_heads=2",
    "head_dim=8",
    "base_mlp_dim=16",
    "base_num_decoder_layers=1",
    "vocab_size=64",
    "max_target_length=8",
    "hardware=cpu",
    "per_device_batch_size=1",
    "sample_tokens=0",
    "loss_curve=false",
    "log_config=false",
]


@pytest.fixture
def refused(tmp_path, users_environment):
    """What a program says that refuses its arguments."""

    def run_and_refuse(program, *words):
        done = run(program, words, tmp_path, users_environment)
        assert done.returncode == exit_codes.USER_ERROR, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert done.stderr.count("error:") == 1
        return done.stderr

    return run_and_refuse


def test_what_train_refuses(mine, tmp_path, refused):
    (tmp_path / "half.py").write_text(
        PART.replace("return x_BTD, {}", "return x_BTD[..., ::2], {}")
    )
    found = refused("train.py", *TINY, "import_modules=half.py")
    assert "mixer mine (" in found
    assert "half.py:10): __call__ returned (float32[1, 8, 8], {})" in found
    assert "has to return (float32[1, 8, 16], {name: scalar})" in found
    assert not (tmp_path / "maxtext_output" / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_what_programs_refuse_after_it(mine, tmp_path, users_environment, refused):
    done = run(
        "train.py", [*TINY, mine, "save_checkpoint_on_start=false"], tmp_path, users_environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = "load_parameters_path=maxtext_output/run"
    found = refused("decode.py", folder, "prompt=a", mine)
    assert "mixer=mine has no decode state: give Mine the methods prefill and decode_step" in found
    for program, *words in (
        ("decode.py", folder, "prompt=a"),
        ("eval.py", folder, "eval_steps=1"),
        ("convert.py", "from=maxtext_output/run", "to=hf:out"),
    ):
        found = refused(program, *words)
        assert "1 problem" in found
        assert "import_modules: the model has parts of mine.py" in found
        assert "add:      import_modules=[mine.py]" in found

    stored = checkpoint_files.resolve_checkpoint("maxtext_output/run", "load_parameters_path")
    metadata = stored.try_metadata()
    assert list(metadata[IMPORTED]) == ["mine.py"]
    (tmp_path / "mine.py").write_text(PART + "# changed\n")
    words = ["from=maxtext_output/run", "to=hf:out", mine]
    done = run("convert.py", words, tmp_path, users_environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning: mine.py has changed since the checkpoint was saved" in done.stdout
    done = run("train.py", [*TINY, mine, "steps=2"], tmp_path, users_environment)
    assert "warning: mine.py has changed since the checkpoint was saved" in done.stdout


def test_sections_of_parts():
    class Keys(Section):
        """Mine."""

        my_width: int = key(3)

    before = Parts()
    part = registry.register("mixer", "mine", keys=Keys)(type("Mine", (), {}))
    try:
        parts = Parts.model_validate({"mixer.mine": {"my_width": 5}})
        assert parts.named("mixer.mine") == parts.of(part) == Keys(my_width=5)
        assert parts.model_dump()["mixer.mine"] == {"my_width": 5}
        assert Parts.model_validate(parts.model_dump()) == parts
        # One registered after the configuration was made has its defaults.
        assert before.named("mixer.mine") == Keys()
        # A letter of layer_pattern sets keys of any section, each where it is.
        changed = parts.with_values({"my_width": 7, "steps": 9})
        assert changed.named("mixer.mine") == Keys(my_width=7)
        assert parts.of(object) is None
        with pytest.raises(KeyError, match=r"mixer\.other"):
            parts.named("mixer.other")
    finally:
        registry.forget(__file__)
