"""Task names to items: ours, templates over a folder, a user's own; and one line for what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from quantkit.demo import bundled_folder
from quantkit.errors import DataError
from quantkit.evaluate import tasks
from quantkit.evaluate.options import EvaluationOptions
from quantkit.evaluate.tasks import Suite, load_suite, load_tasks, suites

CHOICES = {"text": ["red", "blue"], "label": ["A", "B"]}
ITEMS = {
    "hellaswag/validation.jsonl": {"query": "Cats: A cat", "choices": ["sleeps.", "sings."], "label": "0"},
    "piqa/validation.jsonl": {"goal": "Open it", "sol1": "pull", "sol2": "shout", "label": 0},
    "winogrande/validation.jsonl": {
        "sentence": "Ann saw Bo as _ ran.",
        "option1": "Ann",
        "option2": "Bo",
        "answer": "2",
    },
    "arc_easy/validation.jsonl": {"question": "Colour?", "choices": CHOICES, "answerKey": "B"},
    "arc_challenge/validation.jsonl": {"question": "Colour?", "choices": CHOICES, "answerKey": "A"},
    "openbookqa/validation.jsonl": {"question_stem": "Grass is", "choices": CHOICES, "answerKey": "A"},
    "sciq/validation.jsonl": {
        "question": "Why?",
        "support": " Because.",
        "correct_answer": "so",
        "distractor1": "a",
        "distractor2": "b",
        "distractor3": "c",
    },
    "copa/validation.jsonl": {
        "premise": "It rained.",
        "question": "effect",
        "choice1": "It got wet.",
        "choice2": "He sang.",
        "label": 0,
    },
    "boolq/validation.jsonl": {"question": "is it", "passage": "It is.", "label": 1},
    "lambada_openai/test.jsonl": {"text": "the owl sleeps by day"},
    "gsm8k/test.jsonl": {"question": "1+1?", "answer": "It is two.\n#### 2"},
    "blimp/passive_1.jsonl": {"sentence_good": "It was seen.", "sentence_bad": "It was slept."},
    "blimp/drop_argument.jsonl": {"sentence_good": "He eats.", "sentence_bad": "He devours."},
}
# The requests that lm-eval's own tasks make of these items (context, continuation), or the context alone.
REQUESTS = {
    "hellaswag": [("Cats: A cat", " sleeps."), ("Cats: A cat", " sings.")],
    "piqa": [("Question: Open it\nAnswer:", " pull"), ("Question: Open it\nAnswer:", " shout")],
    "winogrande": [("Ann saw Bo as Ann", " ran."), ("Ann saw Bo as Bo", " ran.")],
    "arc_easy": [("Question: Colour?\nAnswer:", " red"), ("Question: Colour?\nAnswer:", " blue")],
    "arc_challenge": [("Question: Colour?\nAnswer:", " red"), ("Question: Colour?\nAnswer:", " blue")],
    "openbookqa": [("Grass is", " red"), ("Grass is", " blue")],
    "sciq": [("Because.\nQuestion: Why?\nAnswer:", f" {answer}") for answer in ("a", "b", "c", "so")],
    "copa": [("It rained therefore", "  it got wet."), ("It rained therefore", "  he sang.")],
    "boolq": [("It is.\nQuestion: is it?\nAnswer:", " no"), ("It is.\nQuestion: is it?\nAnswer:", " yes")],
    "lambada_openai": [("the owl sleeps by", " day")],
    "blimp_passive_1": [("", " It was seen."), ("", " It was slept.")],
    "gsm8k": ["Question: 1+1?\nAnswer:"],
}
TARGETS = {"winogrande": 1, "arc_easy": 1, "arc_challenge": 0, "openbookqa": 0, "sciq": 3, "copa": 0, "boolq": 1}


@pytest.fixture(scope="module", autouse=True)
def few_of_lm_eval():
    """Of lm-eval's 14,000 files those of one task, as to read all takes a quarter of a minute; its command does."""
    from lm_eval.tasks import __file__ as own
    from lm_eval.tasks._index import TaskIndex

    found, folder = TaskIndex._iter_yaml_files, Path(own).parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskIndex, "_iter_yaml_files", lambda root: found(root / "piqa" if root == folder else root))
        tasks._all_of_lm_eval.cache_clear()
        yield
    tasks._all_of_lm_eval.cache_clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("benchmarks")
    for name, item in ITEMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(item) + "\n")
    return folder


def one(name, **source):
    (task,) = load_tasks([name], EvaluationOptions(**source))
    return task


@pytest.mark.parametrize("name", REQUESTS)
def test_templates_ask_what_lm_evals_own_tasks_ask(data, name):
    task = one(name, data=(data,))
    task.set_config(key="num_fewshot", value=0)
    task.build_all_requests()
    asked = [i.args if i.request_type == "loglikelihood" else i.args[0] for i in task.instances]
    assert asked == REQUESTS[name]
    assert task.config.task == f"local_{name}"
    if name == "winogrande":
        assert task.doc_to_text(next(iter(task.test_docs()))) == 1
    elif name in TARGETS:
        assert task.doc_to_target(next(iter(task.test_docs()))) == TARGETS[name]


@pytest.mark.parametrize("name", ["piqa", "openbookqa", "sciq", "arc_easy", "arc_challenge", "lambada_openai", "boolq"])
def test_templates_are_worded_as_in_lm_eval(name):
    import lm_eval.tasks

    upstream = {}
    for path in sorted(Path(lm_eval.tasks.__file__).parent.glob(f"**/{'default' if name == 'boolq' else name}.yaml")):
        text = path.read_text(encoding="utf-8").replace("!function", "")
        definition = yaml.safe_load(text)
        if definition.get("task") == name:
            upstream = definition
    if "include" in upstream:
        upstream = {**yaml.safe_load((path.parent / upstream["include"]).read_text()), **upstream}
    ours = yaml.safe_load((bundled_folder("tasks") / "local" / f"local_{name}.yaml").read_text(encoding="utf-8"))
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice", "output_type"):
        assert ours.get(key) == upstream.get(key), key


def test_every_template_has_items_here_and_every_suite_can_be_read():
    files = {path.stem for path in (bundled_folder("tasks") / "local").glob("*.yaml")}
    assert files == {f"local_{name}" for name in REQUESTS} - {"local_blimp_passive_1"} | {"local_blimp"}
    assert set(suites()) == {"quick", "standard", "long-context"}
    for name in suites():
        suite = load_suite(name)
        own = [*suite.demo.tasks, *(f"local_{task}" for task in suite.others.tasks)]
        assert all((list(bundled_folder("tasks").glob(f"*/{task}.yaml"))) for task in own)


def test_paradigms_alone_and_together(data):
    assert len(one("local_blimp", data=(data,)).test_docs()) == 2
    assert one("local_blimp_drop_argument", data=(data,)).test_docs()[0]["sentence_bad"] == "He devours."
    with pytest.raises(DataError, match=r"'local_blimp_nothing' reads blimp/nothing\.jsonl, which is not in"):
        one("local_blimp_nothing", data=(data,))


def test_demo_stands_for_all_demo_tasks_and_needs_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tasks = load_tasks(["demo_facts", "demo"], EvaluationOptions())
    assert sorted(task.config.task for task in tasks) == sorted(
        f"demo_{name}" for name in ("agreement", "answers", "arithmetic", "facts", "recall", "stories")
    )
    assert all(len(task.test_docs()) == 600 for task in tasks)


OWN = """
task: my_task
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{goal}}}}"
doc_to_target: label
doc_to_choice: "{{{{[sol1, sol2]}}}}"
"""


def test_a_users_own_task(data, tmp_path):
    (tmp_path / "my_task.yaml").write_text(OWN.format(items=data / "piqa/validation.jsonl"))
    (task,) = load_tasks(["my_task"], EvaluationOptions(include_path=(tmp_path,)))
    assert task.config.task == "my_task"


PROGRAM = "def run(doc):\n    from pathlib import Path\n    Path({trace!r}).touch()\n    return doc['goal']\n"


@pytest.fixture
def programmed(data, tmp_path):
    """A folder with a task that names Python, and the file that this Python makes."""
    folder, trace = tmp_path / "tasks", tmp_path / "was here"
    folder.mkdir()
    text = OWN.format(items=data / "piqa/validation.jsonl").replace('"{{goal}}"', "!function own.run")
    (folder / "my_task.yaml").write_text(text)
    (folder / "own.py").write_text(PROGRAM.format(trace=str(trace)))
    return folder, trace


@pytest.mark.slow
def test_python_of_a_task_runs_for_a_folder_that_the_user_has_named_and_for_no_other(programmed, monkeypatch):
    folder, trace = programmed
    monkeypatch.chdir(folder)
    for options in (EvaluationOptions(), EvaluationOptions(data=(folder,))):
        with pytest.raises(DataError, match="unknown task 'my_task'"):
            load_tasks(["my_task"], options)
    with pytest.raises(DataError, match="unknown task"):
        load_tasks([str(folder / "my_task.yaml")], EvaluationOptions())
    assert not trace.exists()
    (task,) = load_tasks(["my_task"], EvaluationOptions(include_path=(folder,)))
    task.doc_to_text(task.test_docs()[0])
    assert trace.exists()


@pytest.mark.parametrize("tag", ["!function own.run", "!!python/object/apply:os.system [touch here]"])
def test_a_suite_names_no_python(programmed, monkeypatch, tag):
    folder, _ = programmed
    monkeypatch.chdir(folder)
    (folder / "suite.yaml").write_text(f"description: {tag}\ndemo: {{tasks: [my_task]}}\nothers: {{tasks: []}}\n")
    with pytest.raises(DataError, match=r"suite\.yaml"):
        load_suite("suite.yaml")
    assert sorted(path.name for path in folder.iterdir()) == ["my_task.yaml", "own.py", "suite.yaml"]


def test_a_missing_item_file_names_itself(data, tmp_path):
    with pytest.raises(
        DataError, match=r"'local_piqa' reads piqa/validation\.jsonl, but no --data folder was given; pass"
    ):
        one("local_piqa")
    with pytest.raises(DataError, match=r"which is not in .*; pass --data DIR with that file"):
        one("local_piqa", data=(tmp_path,))
    with pytest.raises(DataError, match="nowhere is not a directory; --data and --include-path take directories"):
        one("local_piqa", data=(Path("nowhere"),))
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa/validation.jsonl").write_text("{broken")
    with pytest.raises(DataError, match=r"'local_piqa': its items cannot be read .*validation\.jsonl"):
        one("local_piqa", data=(tmp_path,))


@pytest.mark.slow
def test_an_unknown_task_and_unreachable_items():
    with pytest.raises(DataError, match=r"unknown task 'demo_fact' \(did you mean 'demo_facts'\?\)"):
        one("demo_fact")
    with pytest.raises(
        DataError, match=r"task 'piqa': its items cannot be downloaded .*pass --data DIR .*piqa/validation"
    ):
        one("piqa")


BAD_SUITES = [
    ("description: x\ndemo: {}\n", "others: Field required"),
    ("description: x\ndemo: {}\nothers: {task: [a]}\n", "others.task: Extra inputs are not permitted"),
    ("description: x\ndemo: {}\nothers: {limit: 0}\n", "others.limit: Input should be greater than or equal to 1"),
    ("{", "not valid YAML"),
]


@pytest.mark.parametrize(("text", "message"), BAD_SUITES)
def test_mistakes_in_a_suite_are_one_line(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as caught:
        load_suite(str(path))
    assert "\n" not in str(caught.value)


def test_a_suite_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("description: x\ndemo: {tasks: [demo_facts]}\nothers: {}\nseed: 4\n")
    suite = load_suite(str(path))
    assert isinstance(suite, Suite)
    assert (suite.demo.tasks, suite.seed) == (("demo_facts",), 4)
    with pytest.raises(DataError, match=r"unknown suite 'quik' \(did you mean 'quick'\?\)"):
        load_suite("quik")
