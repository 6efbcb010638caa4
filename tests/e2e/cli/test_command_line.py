"""What every command has in common: help, variables, exit codes, one-line errors, whole names."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click
import pytest
from tests.support.commands import here
from tests.support.streams import make_stream

from penstock.cli import common, main
from penstock.jetstream import Broker, connect
from penstock.testing import EmbeddedServer, eventually

PENSTOCK = str(Path(sysconfig.get_path("scripts")) / "penstock")
LONG = "billing_worker_instance_decommission_requested"


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    """The words of every command and subcommand."""
    context = click.Context(group)
    for name in group.list_commands(context):
        yield (*above, name)
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


COMMANDS = list(commands(main.penstock))


def command_of(words: tuple[str, ...]) -> click.Command:
    command: click.Command = main.penstock
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word) or pytest.fail(f"there is no command {words}")
    return command


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line in this process; it must end with `code`. Returns stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def penstock(*arguments: str, code: int = 0) -> tuple[str, str]:
        with pytest.raises(SystemExit) as ended:
            main.run(list(arguments))
        captured = capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out, captured.err

    return penstock


def fill(server: EmbeddedServer, consumers: int = 1) -> None:
    async def made(broker: Broker) -> None:
        await make_stream(broker.jetstream, "PROVISIONING", subjects=["s.>"])
        for n in range(consumers):
            config = {"durable_name": f"{LONG}_{n}", "ack_policy": "explicit", "filter_subject": f"s.{LONG}"}
            await broker.jetstream.create_consumer("PROVISIONING", config)

    async def connected() -> None:
        async with connect(server.settings) as broker:
            await made(broker)

    asyncio.run(connected())


@pytest.mark.parametrize("words", [(), *COMMANDS], ids=" ".join)
def test_every_command_has_help_with_an_example(run: Run, words: tuple[str, ...]) -> None:
    shown, _ = run(*words, "--help")
    assert re.search(r"^ *Example:\n +(\S+ \| )?penstock", shown, re.MULTILINE), shown


def test_flags_of_the_connection_may_follow_the_command(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path / "nats") as one:
        assert here("--servers", "nats://127.0.0.1:1", "status", "--servers", one.url, "--timeout", "5").returncode == 0
        assert here("consumer", "ls", "--servers", one.url).returncode == 0
        wrong = here("status", "--servers", "nats://127.0.0.1:99999")
        assert wrong.returncode == 64, wrong.stderr


def test_every_command_is_walked() -> None:
    assert set(main.COMMANDS) == {words[0] for words in COMMANDS}
    assert ("consumer", "reset") in COMMANDS


def test_the_list_of_commands_has_a_line_for_each_and_imports_none_of_them() -> None:
    code = (
        "import sys; from penstock.cli import main\n"
        "try: main.run(['--help'])\n"
        "finally: print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown = done.stdout.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in shown] == list(main.COMMANDS), "each on a line of its own, 80 columns wide"
    loaded = set(done.stderr.split())
    assert loaded.isdisjoint({"nats", "numpy", "numba", "prometheus_client", "pyarrow", "pyspark", "yaml"})
    assert loaded.isdisjoint({where.partition(":")[0] for where, _ in main.COMMANDS.values()})


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_flag_has_a_variable_that_is_called_like_it(words: tuple[str, ...]) -> None:
    for option in command_of(words).params:
        if isinstance(option, click.Option):
            flag = max(option.opts, key=len).lstrip("-")
            assert option.envvar == "_".join(("PENSTOCK", *words, flag)).replace("-", "_").upper()


def test_the_variable_of_json_works(run: Run, nats_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(nats_server)
    for words in (("status",), ("consumer", "ls"), ("consumer", "show", "PROVISIONING", f"{LONG}_0")):
        name = f"PENSTOCK_{'_'.join(words[:2]).upper()}_JSON"
        monkeypatch.setenv(name, "1")
        assert LONG in str(json.loads(run("--servers", nats_server.url, *words)[0]))
        monkeypatch.setenv(name, "0")
        with pytest.raises(json.JSONDecodeError):
            json.loads(run("--servers", nats_server.url, *words)[0])


WRONG = {
    "--servers": ("::::", "'nats://::::' is not a server URL"),
    "--credentials": ("nowhere.creds", "credentials: there is no file 'nowhere.creds'"),
    "--user": ("u", "user and token are different ways to log in"),
    "--token": ("t", "user and token are different ways to log in"),
    "--tls-ca": ("nowhere.pem", "tls_ca: there is no file 'nowhere.pem'"),
    "--tls-cert": ("x.pem", "tls_cert and tls_key go together"),
    "--tls-key": ("x.pem", "tls_cert and tls_key go together"),
    "--context": ("nosuch", "there is no NATS context 'nosuch'"),
    "--domain": ("a b", "'a b' cannot be a JetStream domain"),
    "--timeout": ("nan", "nan is not a number of seconds above 0"),
    "--inbox-prefix": ("a.*", "inbox_prefix: 'a.*' cannot be one"),
}
CONTRADICTING = {"--user": ["--token", "t"], "--token": ["--user", "u"]}


@pytest.mark.parametrize("flag", WRONG)
def test_a_wrong_value_of_a_global_flag_or_its_variable_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    value, said = WRONG[flag]
    other = CONTRADICTING.get(flag, [])
    code = 1 if "no file" in said else 64  # the command line is right, what it names is not there
    assert said in " ".join(run(*other, flag, value, "status", code=code)[1].split())
    monkeypatch.setenv(f"PENSTOCK_{flag.lstrip('-').replace('-', '_').upper()}", value)
    assert said in " ".join(run(*other, "status", code=code)[1].split())


def test_a_wrong_value_in_the_settings_file_is_an_error_not_wrong_usage(run: Run, tmp_path: Path) -> None:
    for wrong in ("timeout: 0", "servers: 5", "servers: ['::::']"):
        (tmp_path / "penstock.settings.yaml").write_text(wrong)
        assert run("status", code=1)[1].startswith("error: ")


def test_login_and_password_come_from_flags_or_variables(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(WRONG) | {"--password", "--version"} == {option.opts[0] for option in main.penstock.params}
    with EmbeddedServer(tmp_path / "nats", user="u", password="p") as server:
        assert "refused the login" in run("--servers", server.url, "status", code=1)[1]
        run("--servers", server.url, "--user", "u", "--password", "p", "status")
        for name, value in (("SERVERS", server.url), ("USER", "u"), ("PASSWORD", "p")):
            monkeypatch.setenv(f"PENSTOCK_{name}", value)
        run("status")


@pytest.mark.parametrize("words", [["--help"], ["status"], ["status", "--json"]], ids=" ".join)
def test_output_that_cannot_be_written_is_an_error_of_one_line(nats_server: EmbeddedServer, words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [PENSTOCK, "--servers", nats_server.url, *words]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_bug_still_shows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.penstock, "main", lambda *_, **__: dict[str, str]()["missing"])
    with pytest.raises(KeyError):
        main.run([])


@pytest.mark.parametrize("words", [["status"], ["consumer", "ls"]], ids=" ".join)
def test_names_and_numbers_stay_whole_however_narrow_the_terminal(
    nats_server: EmbeddedServer, words: list[str]
) -> None:
    fill(nats_server)
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    command = [PENSTOCK, "--servers", nats_server.url, *words]
    for env in ({}, {"COLUMNS": "80"}, {"COLUMNS": "40"}):
        done = subprocess.run(command, capture_output=True, text=True, env=inherited | env, timeout=60, check=True)
        assert re.search(rf"^ +{LONG}_0 +0\b", done.stdout, re.MULTILINE), done.stdout
        assert words == ["status"] or f"s.{LONG}" in done.stdout


def test_a_table_folds_texts_before_it_gets_wider_than_the_terminal() -> None:
    made = common.table(None, ["name", ("count", "right"), "text"], [("n" * 30, "1,234,567", "some words " * 10)])
    for width, widest in ((80, 80), (40, 30 + 1 + 9 + 1 + common.FOLDED_WIDTH)):
        console = common.Output(width=width)
        with console.capture() as captured:
            console.print(made)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        assert max(map(len, lines)) <= widest + 2
        assert lines[1].startswith("n" * 30)
        assert "1,234,567" in lines[1]


class Terminal:
    """A command on a terminal of 24 rows and 80 columns."""

    def __init__(self, *command: str) -> None:
        self._here, there = pty.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        os.set_blocking(self._here, False)
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=env | {"TERM": "xterm"})
        os.close(there)
        self._seen = b""

    @property
    def shown(self) -> str:
        with suppress(BlockingIOError, OSError):  # nothing new, or the command has ended
            while more := os.read(self._here, 65536):
                self._seen += more
        return self._seen.decode(errors="replace")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._here)


def test_watch_shows_everything_on_a_small_terminal_and_ends_well_with_ctrl_c(nats_server: EmbeddedServer) -> None:
    fill(nats_server, consumers=30)
    terminal = Terminal(PENSTOCK, "--servers", nats_server.url, "status", "--watch", "--every", "0.1")
    try:
        eventually(lambda: terminal.shown.count("until Ctrl-C") >= 2, 60, "two redraws", lambda: terminal.shown)
        for n in range(30):
            assert terminal.shown.count(f"{LONG}_{n} ") >= 2
        assert "nothing unacknowledged" in terminal.shown
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(30) == 0
        assert "error" not in terminal.shown
        assert "Traceback" not in terminal.shown
    finally:
        terminal.close()


def test_watch_shows_an_outage_and_goes_on_after_it(tmp_path: Path) -> None:
    with EmbeddedServer(data=tmp_path / "nats") as server:
        fill(server)
        flags = ("--servers", server.url, "--timeout", "1", "status", "--watch", "--every", "0.1")
        terminal = Terminal(PENSTOCK, *flags)
        try:
            eventually(lambda: "until Ctrl-C" in terminal.shown, 60, "a first look", lambda: terminal.shown)
            server.kill()
            eventually(lambda: "trying again" in terminal.shown, 60, "the outage", lambda: terminal.shown)
            server.start()
            before = terminal.shown.count("nothing unacknowledged")
            eventually(lambda: terminal.shown.count("nothing unacknowledged") > before, 60, "a look after the outage")
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.process.wait(30) == 0
            assert "Traceback" not in terminal.shown
        finally:
            terminal.close()


@pytest.mark.parametrize("every", ["0", "-1", "nan", "inf", "often"])
def test_watch_redraws_after_some_time_that_there_is(run: Run, every: str) -> None:
    run("status", "--watch", "--every", every, code=64)


def test_a_name_server_that_does_not_answer_is_not_waited_for_beyond_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over both connections of a command: the control plane's, and the data plane's."""
    silence, asked, answered = threading.Event(), list[str](), list[str]()

    def silent(host: str, *args: object, **named: object) -> NoReturn:
        asked.append(host)
        silence.wait(60)
        answered.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        for words in (["status"], ["fetch", "reader"], ["dlq", "ls"]):
            done = here("--servers", "nats://a.test", "--timeout", "0.3", *words)
            assert done.returncode == 1, done
            assert "a.test" in done.stderr
        assert len(asked) >= 3
        assert answered == []
    finally:
        silence.set()
