"""`pomona delete`: delete a service, and its Model if nothing else uses it; here, a model that was added."""

import sys
from pathlib import Path

import click

from cli.api_objects import count_serving, find_users, has_condition
from cli.cluster_access import Cluster, read_object, run_in_cluster
from cli.cluster_options import ClusterOptions, namespaced_cluster_options
from cli.completion import complete_served
from cli.confirmation import confirm
from cli.machine.instance import OR_START, choose_instance
from cli.options import state_folder_option
from kube.resources import INFERENCE_SERVICES, MODELS


@click.command("delete")
@click.argument("name", shell_complete=complete_served)
@click.option("--model", "with_model", is_flag=True, help="Also delete its Model, if no other service uses it.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask, even if the service serves now.")
@state_folder_option
@namespaced_cluster_options
def command(name: str, *, target: ClusterOptions, with_model: bool, yes: bool, state_dir: Path | None) -> None:
    """Delete the service NAME.

    The running `pomona up` of this machine is asked, unless -n, --context or --kubeconfig names a cluster: it removes a
    model that `pomona run`, or a client of Ollama's API, has added, once its running requests have ended.

    In a cluster, its Model stays, with its weights on volumes, unless --model is given. Weights on hosts stay until
    their disk is short, or until `pomona weights delete`.

    \b
    Examples:
      pomona delete chat
      pomona delete chat --model --yes
    """
    if instance := choose_instance(target, state_dir):
        instance.say_asked()
        instance.call(lambda client: client.remove(name))
        print(f"{name} is served no more; `pomona weights list` shows its weights")
        return
    run_in_cluster(
        target, lambda cluster: _delete(cluster, name, with_model=with_model, is_certain=yes), instead=OR_START
    )


async def _delete(cluster: Cluster, name: str, *, with_model: bool, is_certain: bool) -> None:
    """Delete a service, and its Model if `with_model` is set and no other service uses that.

    Args:
        cluster: the cluster.
        name: the service.
        with_model: delete the Model as well.
        is_certain: do not ask, even if the service serves now.
    """
    # 1. Ask first, if the service serves now.
    client, namespace = cluster.client, cluster.namespace
    service = await read_object(client, INFERENCE_SERVICES, name, namespace)
    if not is_certain and has_condition(service, "Ready"):
        replicas = count_serving(service)
        count = "1 replica" if replicas == 1 else f"{replicas} replicas"
        confirm(f"{name} in namespace {namespace} serves now, with {count}", "Delete it?")

    # 2. Delete it. With the uid, a service of the same name that was made meanwhile stays.
    await client.delete(INFERENCE_SERVICES, name, namespace, uid=service["metadata"]["uid"])
    print(f"deleted InferenceService {name} in namespace {namespace}")
    if not with_model:
        return

    # 3. Delete its Model, unless other services use it.
    model = service["spec"]["modelRef"]
    users = find_users(model, name, (await client.list(INFERENCE_SERVICES, namespace)).items)
    if users:
        print(f"Model {model} stays: it is used by {', '.join(users)}", file=sys.stderr)
        return
    stored = await read_object(client, MODELS, model, namespace)
    await client.delete(MODELS, model, namespace, uid=stored["metadata"]["uid"])
    print(f"deleted Model {model} in namespace {namespace}")
