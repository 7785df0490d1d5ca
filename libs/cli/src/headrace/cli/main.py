"""The `headrace` command."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from headrace.api.common.v1 import sampling_pb2
from headrace.base.errors import StartError
from headrace.cli import audit as audit_command
from headrace.cli import chat as chat_command
from headrace.cli import explain as explain_command
from headrace.cli import intent as intent_command
from headrace.cli import issuer, key, tenant
from headrace.cli import logs as logs_command
from headrace.cli import status as status_command
from headrace.cli import usage as usage_command
from headrace.cli.constraint import constrain
from headrace.cli.gateway import access
from headrace.cli.guard import INTERRUPTED, READER_GONE, plain_errors, run
from headrace.cli.home import Home, same_process
from headrace.cli.intent import DEFAULT_DEPLOYMENT, Wanted, etcd_endpoints
from headrace.cli.stack import StackSettings
from headrace.cli.up import UpSettings, up

app = typer.Typer(
    help="Headrace: LLM serving with predictable response times.\n\n"
    "Start with `headrace up`, then `headrace chat` from another terminal.\n\n"
    "HEADRACE_HOME names the data folder. HEADRACE_GATEWAY and HEADRACE_API_KEY point chat and generate at "
    "another gateway.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(key.app, name="key")
app.add_typer(tenant.app, name="tenant")
app.add_typer(issuer.app, name="issuer")

PRECISION_HELP = "float32 (exact, slowest), bfloat16, int8 or int4 (smallest; loses much on small models)."
Precision = Annotated[str, typer.Option(help=PRECISION_HELP)]
KeptPrecision = Annotated[str | None, typer.Option(help=PRECISION_HELP)]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0, max=2, help="0: greedy (the default).")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Nucleus sampling, in (0, 1].")]
TopK = Annotated[int | None, typer.Option("--top-k", min=0, help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Same seed, same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")]
ModelPath = Annotated[
    Path | None, typer.Option(help="A .gguf file or Hugging Face folder (default: the shipped model).")
]
DeploymentName = Annotated[str, typer.Option(help="Deployment name.")]
Replicas = Annotated[int, typer.Option(min=0, max=64, help="Engine replicas.")]
BackendOption = Annotated[
    str, typer.Option(help="model, or simulated: deterministic timing and text, no weights.", metavar="NAME")
]
EngineSettings = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="An engine setting, e.g. max_num_seqs=16; may be repeated. `python -m headrace.engine --help` lists them.",
    ),
]
# For `apply`, where what is left out stays as it is.
KeptModel = Annotated[
    Path | None,
    typer.Option("--model", help="A .gguf file or Hugging Face folder (new deployment: the shipped model)."),
]
KeptReplicas = Annotated[
    int | None, typer.Option("--replicas", min=0, max=64, help="Engine replicas (new deployment: 1).")
]
KeptBackend = Annotated[
    str | None, typer.Option("--backend", metavar="NAME", help="model or simulated (new deployment: model).")
]
ModelName = Annotated[str | None, typer.Option("--model", help="Deployment name (default: the first there is).")]


def _sampling(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    seed: int | None,
    stop: list[str] | None,
) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or []
    )


def _engine_settings(given: list[str] | None) -> dict[str, str]:
    settings = {}
    for item in given or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise StartError(f"--engine {item!r} is not NAME=VALUE, such as max_num_seqs=16")
        settings[key.replace("-", "_")] = value
    return settings


def _as_text(prompt: str) -> str:
    """The prompt, or standard input for "-"; StartError for bytes that are not UTF-8."""
    try:
        if prompt == "-":
            return sys.stdin.buffer.read().decode()
        prompt.encode()  # arguments that are not UTF-8 come as lone surrogates
        return prompt
    except UnicodeError as error:
        where = "standard input" if prompt == "-" else "the prompt"
        raise StartError(f"{where} is not UTF-8 text: {error}") from None


@app.command("up")
def up_command(
    model: ModelPath = None,
    name: DeploymentName = DEFAULT_DEPLOYMENT,
    replicas: Replicas = 1,
    backend: BackendOption = "model",
    precision: Precision = "bfloat16",
    engine: EngineSettings = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Gateway port (default: 8700, or a free one).")
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Services talk to each other over TLS, with certificates on both sides.")
    ] = False,
    demo: Annotated[
        bool, typer.Option("--demo", help="Send one prompt when ready and show where the time went.")
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="Stop cleanly after the demo, instead of staying up.")] = False,
    prompt: Annotated[str, typer.Option(help="The demo's prompt.")] = "Why is the sky blue?",
) -> None:
    """Start the local stack in the foreground: etcd, Redis, all services, the engines. Ctrl-C drains and stops it."""
    with plain_errors("up"):
        if demo and replicas == 0:
            raise StartError("--demo needs at least one replica")
        settings = _engine_settings(engine)
        wanted = Wanted(
            deployment=name,
            model=model,
            replicas=replicas,
            backend=backend,
            engine_settings=settings,
            precision=precision,
        )
        # Without a terminal nobody can press Ctrl-C after a demo, so it ends by itself.
        ends = once or (demo and not sys.stdout.isatty())
        request = UpSettings(
            stack=StackSettings(wanted=wanted, port=port, tls=tls), demo=demo, once=ends, prompt=prompt
        )
    run("up", up(Home.default(), request))


@app.command()
def down(
    grace: Annotated[float, typer.Option(min=1, help="Seconds to wait for a clean drain before giving up.")] = 120.0,
) -> None:
    """Stop the running stack cleanly: running answers finish first."""
    with plain_errors("down"):
        record = Home.default().running()
        os.kill(record.pid, signal.SIGTERM)
        began = time.monotonic()
        while same_process(record.pid, record.create_time):
            if time.monotonic() - began > grace:
                raise StartError(f"process {record.pid} still runs after {grace:.0f} s: see its terminal")
            time.sleep(0.05)
        print(f"stopped after {time.monotonic() - began:.1f} s")


@app.command()
def status() -> None:
    """Show services, deployments (desired and ready) and replicas (load, freshness)."""
    run("status", status_command.status(Home.default()))


@app.command()
def chat(
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="A system message to open with.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Talk to the model; answers stream. Reads lines from a pipe, too."""
    with plain_errors("chat"):
        given = access(Home.default())
    sampling = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
    run("chat", chat_command.chat(given, sampling, model=model, system=system))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: ModelName = None,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Send it as a user's message instead of a text to continue.")
    ] = False,
    timings: Annotated[bool, typer.Option("--timings", help="Show where the time went (on stderr).")] = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    min_p: Annotated[
        float | None, typer.Option("--min-p", min=0, max=1, help="Keep tokens this share as likely as the likeliest.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option("--json-schema", help="File with a JSON Schema the answer must fit.")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="The whole answer matches this.")] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", help="The answer is one of these; may be repeated.")
    ] = None,
) -> None:
    """Continue a text; the answer streams to standard output."""
    with plain_errors("generate"):
        given = access(Home.default())
        text = _as_text(prompt)
        sampling = _sampling(max_tokens, temperature, top_p, top_k, seed, stop)
        if min_p is not None:
            sampling.min_p = min_p
        constrain(sampling, json_schema, regex, choice)
    run("generate", chat_command.generate(given, text, sampling, model=model, as_chat=as_chat, timings=timings))


@app.command()
def logs(
    service: Annotated[
        str, typer.Argument(help="gateway, router, controller, telemetry, engine, etcd, redis or a replica's id.")
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is appended, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines from the end.")] = 50,
) -> None:
    """Show a service's log."""
    with plain_errors("logs"):
        logs_command.show(logs_command.log_path(Home.default(), service), lines=lines, follow=follow)


@app.command()
def trace(
    key: Annotated[str | None, typer.Argument(help="Trace id or request id; left out: list the newest traces.")] = None,
) -> None:
    """Show where one request's time went, over all services."""
    run("trace", status_command.show_trace(Home.default(), key))


@app.command()
def explain(request: Annotated[str, typer.Argument(help="The request's id.")]) -> None:
    """Show why a request ran where it did: every replica's verdict and numbers, and the outcome."""
    with plain_errors("explain"):
        addresses = explain_command.router_addresses(Home.default())
    run("explain", explain_command.explain(addresses, request))


@app.command("apply")
def apply_command(
    model: KeptModel = None,
    name: DeploymentName = DEFAULT_DEPLOYMENT,
    replicas: KeptReplicas = None,
    backend: KeptBackend = None,
    precision: KeptPrecision = None,
    engine: EngineSettings = None,
    tenant: Annotated[
        list[str] | None, typer.Option(help="Open it to this tenant and no others but those named; may be repeated.")
    ] = None,
    all_tenants: Annotated[
        bool, typer.Option("--all-tenants", help="Open it to all tenants (a new deployment is).")
    ] = False,
    prefixes: Annotated[
        str | None,
        typer.Option(
            metavar="OWN|SHARED",
            help="own: each tenant meets only its own cached prompt beginnings (a new deployment's). shared: each "
            "other's too: faster, but from an answer's time a tenant can tell what others have sent.",
        ),
    ] = None,
) -> None:
    """Make or change a deployment, e.g. `headrace apply --replicas 2`; what is left out stays as it is.

    Written to etcd (HEADRACE_ETCD_ENDPOINTS, else the running stack's); the controller makes it so.
    """
    with plain_errors("apply"):
        if tenant and all_tenants:
            raise StartError("--tenant and --all-tenants exclude each other")
        if prefixes not in (None, "own", "shared"):
            raise StartError(f"--prefixes {prefixes!r} is neither own nor shared")
        settings = _engine_settings(engine) if engine else None
        wanted = Wanted(
            deployment=name,
            model=model,
            replicas=replicas,
            backend=backend,
            engine_settings=settings,
            precision=precision,
            tenants=[] if all_tenants else tenant or None,
            shared_prefixes=None if prefixes is None else prefixes == "shared",
        )
        endpoints = etcd_endpoints(Home.default())
    run("apply", intent_command.apply_and_say(endpoints, wanted))


@app.command("delete")
def delete_command(
    name: Annotated[str, typer.Argument(help="The deployment; `headrace status` lists those there are.")],
) -> None:
    """Delete a deployment: new requests for it are refused at once, running answers finish, then its replicas end.

    Its bundle stays in etcd; `headrace apply --name NAME --model …` makes the deployment anew.
    """
    with plain_errors("delete"):
        endpoints = etcd_endpoints(Home.default())
    run("delete", intent_command.delete_and_say(endpoints, name))


@app.command("setup")
def setup_command(
    key_file: Annotated[Path, typer.Option(help="Where the first API key is kept, readable by its owner alone.")],
    model: ModelPath = None,
    name: DeploymentName = DEFAULT_DEPLOYMENT,
    precision: Precision = "bfloat16",
    replicas: KeptReplicas = None,
) -> None:
    """Prepare an etcd: a deployment and a first API key. Running it again keeps the key and the replicas."""
    with plain_errors("setup"):
        wanted = Wanted(deployment=name, model=model, replicas=replicas, precision=precision)
        endpoints = etcd_endpoints(Home.default())
    run("setup", intent_command.setup(endpoints, wanted, key_file))


@app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(help="Where to keep them; made private. What is there already is used on.")],
) -> None:
    """Make a private authority and a certificate with which services prove themselves to each other (TLS)."""
    with plain_errors("certs"):
        from headrace.cli.certs import say_certs  # loads a library that no other command needs

        say_certs(folder)


app.command("usage")(usage_command.command)
app.command("audit")(audit_command.command)


def main() -> None:
    """Entry point of the `headrace` command: wrong usage is one line and status 2, like every error one line."""
    try:
        status = app(standalone_mode=False) or 0
    except TyperException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "headrace"
        if error.format_message():  # empty: the help was printed, as there was no command
            print(f"{command}: {error.format_message()} (see {command} --help)", file=sys.stderr)
        status = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        status = status or READER_GONE
    if status == READER_GONE:
        # The interpreter flushes once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status)
