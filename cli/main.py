"""The `pomona` command. A sub-command is imported only when it runs, so that help is quick."""

from typing import Any

import click

from cli.lazy import KUBECTL_PLUGIN, LazyGroup, rename_examples
from cli.standard_streams import usable_streams

SECTIONS = {
    "Services of the running `pomona up` or of a cluster": {
        "list": ("list the services", "cli.service.list"),
        "status": ("show what a service waits for", "cli.service.status"),
        "chat": ("ask a service", "cli.service.chat"),
        "logs": ("print what the engines of a service have logged", "cli.service.logs"),
    },
    "Services of a cluster": {
        "deploy": ("serve a model in the cluster", "cli.service.deploy"),
        "queue": ("list the services that wait for accelerators or hosts", "cli.queue.command"),
        "plan": ("show what the queue would do after a change", "cli.queue.plan"),
        "fit": ("show which nodes and hosts run a model, and how fast", "cli.density.fit"),
        "simulate": ("show each node and host before and after a further model", "cli.density.simulate"),
        "cost": ("show what services and namespaces take, and cost", "cli.density.cost"),
        "key": ("make, list, replace and delete keys for the gateway", "cli.key.command"),
        "endpoint": ("print the configuration of a client for the gateway", "cli.endpoint.command"),
        "bench": ("measure how fast a service, or any engine, generates", "cli.service.bench"),
        "delete": ("delete a service of the cluster", "cli.service.delete"),
        "catalog": ("list models that `pomona deploy` knows by name", "cli.service.catalog"),
    },
    "Hosts of a cluster, such as Macs": {
        "hosts": ("list the hosts outside of the cluster", "cli.host.membership:list_hosts"),
        "host": ("invite, look at, drain and remove hosts outside of the cluster", "cli.host.command"),
        "agent": ("serve models on this machine as a host of a cluster", "cli.agent.command"),
    },
    "On this machine alone": {
        "run": ("talk to a model, also without a running `pomona up`", "cli.machine.run"),
        "up": ("serve models on this machine alone, without a cluster", "cli.up"),
        "down": ("stop the running `pomona up`", "cli.machine.down"),
        "ps": ("list the models that are loaded", "cli.machine.ps"),
        "load": ("load a model now", "cli.machine.load:load"),
        "unload": ("unload a model; its next request loads it again", "cli.machine.load:unload"),
        "stop": ("unload a model, in Ollama's word", "cli.machine.load:unload"),
        "pull": ("fetch the weights of a model ahead", "cli.machine.pull"),
        "weights": ("list stored weights, and delete some", "cli.machine.weights"),
        "inspect": ("print the facts in the header of a model, without downloading it", "cli.inspect"),
        "fetch": ("download a file of weights, resumed and verified", "cli.fetch"),
        "completion": ("print the completion script for a shell", "cli.completion"),
    },
    "Programs that others start": {
        "controller": ("run the controller of Models and InferenceServices", "cli.controller"),
        "console": ("answer over HTTP what fits where, how fast, and at what cost", "cli.console"),
        "gateway": ("serve all services of a cluster at one address, to clients with keys", "cli.gateway"),
        "extender": ("score nodes for a kube-scheduler by the speed of models", "cli.extender"),
        "llama-server": ("run llama.cpp's server out of the wheel of `pomona[llama]`", "cli.llama_server"),
        "node-agent": ("report the hardware of a node; the chart's DaemonSet starts it", "cli.node_agent"),
        "pod-proxy": ("run the data plane of a pod; the controller starts it", "cli.pod_proxy"),
        "proxy": ("run the data plane of a host; its agent starts it", "cli.proxy"),
    },
}
"""The commands in the order of the help: the line and the module with the `command`, by name."""
SUBCOMMANDS = {name: command for commands in SECTIONS.values() for name, command in commands.items()}


class Program(LazyGroup):
    """The program: a group that is called with the words of the command line."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run a command with usable standard streams."""
        with usable_streams():
            return super().main(*args, **settings)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands into the help, in sections: those that people use come before those that machines run."""
        del ctx
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, line) for name, (line, _) in commands.items()])


@click.group(cls=Program, subcommands=SUBCOMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pomona", prog_name="pomona")
def main() -> None:
    """Serve large language models on the hardware you own: pods and hosts outside the cluster, one API.

    \b
    Examples:
      pomona deploy chat --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf --accelerator metal
      pomona status chat
      pomona chat chat 'Who are you?'
      pomona run hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona up --model hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona inspect hf://Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf
      pomona controller --kubeconfig ~/.kube/config
      pomona host join studio-1
      pomona agent join pomona-join-2.eNqrV...
    """


def run_as_kubectl_plugin() -> None:
    """Run as `kubectl pomona`: kubectl starts the program `kubectl-pomona`."""
    rename_examples(main, KUBECTL_PLUGIN)
    main(prog_name=KUBECTL_PLUGIN)


if __name__ == "__main__":
    main()
