"""Magics in an IPython shell and in a real notebook kernel."""

from __future__ import annotations

import random
import re
import signal
from typing import TYPE_CHECKING

import pytest
from IPython.core.error import UsageError as IPythonUsageError

import nbdist

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from tests.kernels import Kernel

NEED_A_CLUSTER = {
    "dist_status": "",
    "dist_stop": "",
    "dist_restart": "",
    "dist_logs": "0",
    "dist_push": "a",
    "dist_pull": "a",
    "dist_show": "a",
}


@pytest.mark.parametrize("magic", NEED_A_CLUSTER)
def test_a_magic_without_a_cluster_names_dist_start(shell: InteractiveShell, magic: str) -> None:
    shell.user_ns["a"] = 1
    with pytest.raises(nbdist.NoClusterError, match=f"%{magic} needs .* %dist_start 4 hosts"):
        shell.run_line_magic(magic, NEED_A_CLUSTER[magic])


def test_a_cell_without_a_cluster_is_refused(shell: InteractiveShell) -> None:
    with pytest.raises(nbdist.NoClusterError, match="%%dist_run needs"):
        shell.run_cell_magic("dist_run", "", "1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no hosts requested"),
        ("gpu1 gpu$", "invalid host 'gpu\\$'"),
        ("--hosts no/such/file", "no/such/file cannot be read"),
        ("0", "need at least 1 host, got 0"),
        ("10000 hosts", "10000 hosts need about"),
        ("2 --env NOVALUE", "'NOVALUE': use NAME=VALUE"),
    ],
)
def test_an_invalid_start_starts_nothing(shell: InteractiveShell, line: str, message: str) -> None:
    with pytest.raises(nbdist.UsageError, match=message):
        shell.run_line_magic("dist_start", line)
    with pytest.raises(nbdist.NoClusterError):
        shell.run_line_magic("dist_status", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("4 --no-such-option", "unrecognized arguments: --no-such-option"),
        ("4 --framework torch", "choose from"),
        ("-n many", "argument -n/--number: 'many' is not a whole number"),
        ("4 --sparse 1", "--sparse 1; did you mean --spares?"),
        ("4 --banana", "--banana; options are --communication"),
    ],
)
def test_invalid_options_are_usage_errors(shell: InteractiveShell, line: str, message: str) -> None:
    with pytest.raises(IPythonUsageError, match=re.escape(message)):
        shell.run_line_magic("dist_start", line)


def test_help_shows_the_options(shell: InteractiveShell) -> None:
    text = shell.magics_manager.magics["line"]["dist_start"].__doc__
    assert "--devices-per-host" in text
    assert "virtual CPU devices" in text


# In a real kernel, in which the fixture has started two workers.


def test_output_of_a_cell_is_labelled_by_rank(kernel: Kernel) -> None:
    done = kernel.run("%%dist_run\nprint('hi')\nrank").check()
    assert re.search(r"^\[0-1@.+\] hi$", done.stdout, re.MULTILINE)
    assert re.search(r"^\[1@.+\] Out: 1$", done.stdout, re.MULTILINE)


def test_a_strategy_of_the_workers_is_refused_in_the_notebook(kernel: Kernel) -> None:
    done = kernel.run("import nbdist\nnbdist.PjRTStrategy()")
    assert done.ename == "StrategyError"
    assert "begin the cell with %%dist_run --strategy pjrt" in done.traceback
    kernel.run("import sys\nassert 'jax' not in sys.modules").check()
    done = kernel.run("%%dist_run\nimport nbdist\nnbdist.PjRTStrategy().num_replicas_in_sync")
    assert "2" in done.check().stdout


def test_rich_displays_are_forwarded_to_the_front_end(kernel: Kernel) -> None:
    done = kernel.run(
        "%%dist_run -t 1\nfrom IPython.display import HTML, display\n"
        "handle = display(HTML('<i>first</i>'), display_id=True)\nhandle.update(HTML('then'))"
    ).check()
    assert done.plain == ["<IPython.core.display.HTML object>"] * 2


def test_a_second_start_names_the_running_cluster(kernel: Kernel) -> None:
    done = kernel.run("%dist_start 3")
    assert done.ename == "UsageError"
    assert "of 2 workers: jax> is running" in done.traceback
    assert "%dist_restart" in done.traceback


def test_status_push_pull_and_logs(kernel: Kernel) -> None:
    pushed = kernel.run("a = [1, 2]\n%dist_push a").check()
    assert re.fullmatch(r"nbdist: copied `a` to 2 workers \(\d+ B each\)\n", pushed.stdout)
    kernel.run("%%dist_run\nb = a + [rank]").check()
    pulled = kernel.run("%dist_pull b -r 1 -o c\nc").check()
    assert pulled.plain == ["[1, 2, 1]"]
    assert pulled.stdout == "nbdist: copied `b` from rank 1 as `c`\n"
    again = kernel.run("%dist_pull b -r 1 -o c").check()  # its own copy
    assert again.stdout == (
        "nbdist: copied `b` from rank 1 as `c`; replaced `c` (list) of the notebook\n"
    )
    refused = kernel.run("b = 'here'\n%dist_pull b")
    assert refused.ename == "UsageError"
    assert "the notebook has another `b`" in refused.traceback
    assert "%dist_pull b --replace" in refused.traceback
    assert kernel.run("b").check().plain == ["'here'"]
    kernel.run("%dist_pull a").check()  # pushed by this notebook
    pulled = kernel.run("%dist_pull b --replace\nb").check()
    assert pulled.plain == ["[[1, 2, 0], [1, 2, 1]]"]
    assert pulled.stdout == (
        "nbdist: copied `b` from 2 workers; replaced `b` (str) of the notebook\n"
    )
    kernel.run("%%dist_run\nprint('for the log')").check()
    assert "for the log" in kernel.run("%dist_logs 1").check().stdout
    assert "2 workers, 2 idle" in kernel.run("%dist_status").check().plain[0]


def test_cells_are_seeded_and_status_shows_the_seed(kernel: Kernel) -> None:
    draw = "%%dist_run --seed 5\nimport random\nrandom.random()"
    for _ in range(2):
        assert f"Out: {random.Random(5).random()}" in kernel.run(draw).check().stdout
    done = kernel.run("%%dist_run --seed -1\n1")
    assert "--seed -1: use a whole number from 0" in done.traceback
    assert "2 workers, 2 idle, seed 7" in kernel.run("%dist_status").check().plain[0]


def test_a_traceback_has_the_number_of_the_prompt(kernel: Kernel) -> None:
    request = kernel.send("%%dist_run\n1 / 0")
    traceback = kernel.collect(request).traceback
    prompt = int(kernel.run("print(len(In) - 2)").check().stdout)
    assert f"Cell In[{prompt}], line 2" in re.sub(r"\x1b\[[0-9;]*m", "", traceback)


def test_show_prints_the_placement_of_arrays(kernel: Kernel) -> None:
    kernel.run("%%dist_run\nimport numpy as np\ntable = {'w': np.ones((3, 2))}").check()
    done = kernel.run("%dist_show table").check()
    assert done.plain[0].startswith("table: 1 array, 96 B")


@pytest.mark.parametrize(
    ("code", "ename", "message"),
    [
        ("%dist_push nothing", "UsageError", "no such name in the notebook: nothing"),
        ("%dist_pull nothing", "TransferError", "rank 0: nothing; rank 1: nothing"),
        ("%dist_pull a b -o c", "UsageError", "-o c is one name for 2 objects"),
        ("import threading; x = threading.Lock()\n%dist_push x", "TransferError", "x (lock)"),
        ("%%dist_run -t 5\n1", "UsageError", "no rank 5"),
        ("%%dist_run --strategy mirrored\n1", "UsageError", "needs tensorflow"),
        ("%%dist_run\n \n", "UsageError", "the cell is empty"),
        ("%dist_logs 9", "UsageError", "no rank 9"),
        ("%dist_show nothing", "TransferError", "no such name on the workers: nothing"),
        ("%dist_show x[0]", "UsageError", "'x[0]': type names as in %dist_show params"),
    ],
)
def test_invalid_input_shows_one_error_without_traceback(
    kernel: Kernel, code: str, ename: str, message: str
) -> None:
    done = kernel.run(code)
    assert (done.status, done.ename) == ("error", ename)
    assert message in done.traceback
    assert "Traceback" not in done.traceback


def test_a_run_is_assigned_to_a_name(kernel: Kernel) -> None:
    kernel.run("%%dist_run -o run\nreport(epoch=1, loss=rank)").check()
    assert kernel.run("run.last('loss')").check().plain == ["0.5"]
    assert "epoch 1" in kernel.run("run.table('loss')").check().plain[0]


def test_data_of_the_notebook_is_sent_once(kernel: Kernel) -> None:
    cell = "%%dist_run --strategy pjrt --data here --batch 4 -o run\nloss = batch.mean()"
    kernel.run("import numpy as np\nhere = np.arange(8.0)").check()
    first = kernel.run(cell).check()
    assert "moved `here` from the notebook" in first.stdout
    assert "4 samples a batch, 2 on each of 2 replicas; 8 samples by element" in first.stdout
    assert "moved" not in kernel.run(cell).check().stdout
    kernel.run("here = np.arange(8.0) + 1").check()
    assert "moved" in kernel.run(cell).check().stdout
    assert kernel.run("print(run.loss)").check().stdout.strip() == "[2.5 6.5]"
    kernel.run("here *= 2").check()  # in place: the same object
    assert "moved" in kernel.run(cell).check().stdout
    assert kernel.run("print(run.loss)").check().stdout.strip() == "[ 5. 13.]"
    kernel.run("%%dist_run\nhere = [7.0, 9.0]").check()  # a name of the workers has priority
    kernel.run("here = None").check()
    kernel.run(cell).check()
    assert kernel.run("print(run.loss)").check().stdout.strip() == "[8.]"
    kernel.run("here = (x for x in range(3))\n%dist_restart").check()
    refused = kernel.run(cell)
    assert "here (generator) cannot be pickled" in refused.traceback


def test_progress_is_one_line_that_the_run_replaces(kernel: Kernel) -> None:
    kernel.run("%%dist_run\nimport numpy as np\nones = np.ones(4000)").check()
    cell = "%%dist_run --strategy pjrt --data ones --batch 4 --epochs 2\nloss = batch.mean()"
    done = kernel.run(cell).check()
    assert done.plain[-2].startswith("epoch 2 of 2 · step 2,000 of 2,000 · loss 1 (last step) · ")
    assert "finished in" in done.plain[-1]
    assert "epoch 2 of 2, step 2,000 of 2,000" in done.plain[-1]
    assert "epoch 1  loss 1 " in done.stdout
    assert "step 1" not in done.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--check --scale-lr", "--scale-lr without --data"),
        ("--data x --bucket 8,y", "--bucket 8,y: use lengths"),
        ("--data x --bucket 0", "--bucket 0: use a whole number from 1"),
        ("--guard -1", "--guard -1: use a whole number from 0"),
        ("--data x --guard -1 --steps -1", "--guard -1: use a whole number from 0\n--steps -1"),
        ("--strategy pjrt --data x --precision float16", "cast them, as in x.astype"),
    ],
)
def test_invalid_step_options_run_nothing(kernel: Kernel, line: str, message: str) -> None:
    refused = kernel.run(f"x = 1\nget_ipython().run_cell_magic('dist_run', '{line}', 'loss = 1')")
    assert refused.ename == "UsageError"
    assert message in refused.traceback


def test_an_error_is_coloured_and_stops_the_queue(kernel: Kernel) -> None:
    first = kernel.send("%%dist_run\nx = 1\nif rank == 1:\n    x / 0")
    queued = kernel.client.execute("ran = True")
    done = kernel.collect(first)
    assert (done.status, done.ename) == ("error", "CellError")
    text = re.sub(r"\x1b\[[0-9;]*m", "", done.traceback)
    assert re.search(r"Cell In\[\d+\], line 4", text)
    assert re.search(r"ZeroDivisionError: division by zero\n\nraised on rank 1@\S+\n", text)
    assert kernel.reply(queued)["status"] == "aborted"


def test_an_interrupt_of_the_kernel_stops_the_workers(kernel: Kernel) -> None:
    request = kernel.send(
        "%%dist_run\nimport time\nprint('in')\nhung = True\ntime.sleep(100)\nhung = 0"
    )
    kernel.wait_for_text(request, "in")
    kernel.manager.interrupt_kernel()
    done = kernel.collect(request)
    prompt = int(kernel.run("print(len(In) - 2)").check().stdout)
    assert done.traceback == (
        f"KeyboardInterrupt: stopped at Cell In[{prompt}], line 5: time.sleep(100); "
        "the workers keep their variables"
    )
    assert "Out: True" in kernel.run("%%dist_run\nhung").check().stdout


def test_many_lines_are_short_on_screen_and_whole_in_the_log(kernel: Kernel) -> None:
    done = kernel.run(
        "%%dist_run\nfor i in range(8000):\n    print(f'{rank} counts {i:06d}')"
    ).check()
    assert done.sent_bytes < 1_000_000
    log = kernel.run("%dist_logs 1").check().stdout
    assert [line for line in log.splitlines() if " counts " in line] == [
        f"1 counts {i:06d}" for i in range(8000)
    ]


@pytest.mark.parametrize(
    ("typed", "candidates"),
    [
        ("%dist_start 4 --f", {"--framework"}),
        ("%dist_start 4 --framework ", {"tensorflow", "jax", "both"}),
        ("%dist_start --framework t", {"tensorflow"}),
        ("%dist_start t", {"tpu"}),
        ("%%dist_run --s", {"--strategy", "--seed"}),
        ("%dist_start 2 --se", {"--seed"}),
        ("%%dist_run --strategy p", {"pjrt"}),
        ("  %dist_start 4\t--dev", {"--devices-per-host"}),
        ("%%dist_run --", {"--checkpoint", "--output"}),
    ],
)
def test_options_and_choices_are_completed(
    kernel: Kernel, typed: str, candidates: set[str]
) -> None:
    reply = kernel.complete(typed)
    assert candidates <= set(reply["matches"])
    assert typed[reply["cursor_start"] : reply["cursor_end"]] == typed.split()[-1] * (
        typed[-1] != " "
    )


def test_completions_are_described_and_common_options_are_first(kernel: Kernel) -> None:
    found = kernel.complete("%%dist_run --")["metadata"]["_jupyter_types_experimental"]
    assert [one["text"] for one in found[:4]] == ["--data", "--batch", "--epochs", "--steps"]
    assert found[1]["type"] == "Samples in a global batch."


def test_a_fit_with_data_is_refused(kernel: Kernel) -> None:
    done = kernel.run("%%dist_run --strategy pjrt --data x --batch 4\nmodel.fit(x, x)")
    assert "line 2: `model.fit` reads its own data: remove --data and --batch" in done.traceback


def test_a_module_of_the_notebook_is_imported_in_the_cell(kernel: Kernel) -> None:
    done = kernel.run("import fractions as fr\nget_ipython().run_cell_magic('dist_run','','fr.x')")
    assert "add `import fractions as fr` to the cell" in done.traceback


@pytest.mark.processes
def test_no_interrupt_handler_remains_after_cells() -> None:
    """Check this process: nbdist has restored the original handler."""
    left = signal.getsignal(signal.SIGINT)
    assert left in {
        signal.default_int_handler,
        signal.SIG_IGN,
    }  # SIG_IGN if the tests run in the background
