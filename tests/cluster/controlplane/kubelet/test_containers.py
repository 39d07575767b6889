"""Promises of the documentation about a container's view: variables, files, network, and nothing of the host."""

from pathlib import Path

from tests.cluster.controlplane.kubelet.conftest import Pods

MESSAGE = "/dev/termination-log"


async def test_the_projected_token_is_valid_at_the_in_cluster_address(pods: Pods) -> None:
    script = f"""
        cd /var/run/secrets/kubernetes.io/serviceaccount
        review='{{"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}}'
        curl --silent --fail --cacert ca.crt --header "Authorization: Bearer $(cat token)" --json "$review" \
            https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/apis/authentication.k8s.io/v1/selfsubjectreviews \
            | grep -o 'system:serviceaccount:[^"]*' > {MESSAGE}
        cat namespace >> {MESSAGE}
    """
    output = await pods.output(script)
    assert output == f"system:serviceaccount:{pods.namespace}:default\n{pods.namespace}"


async def test_a_container_cannot_write_to_the_host(pods: Pods) -> None:
    script = f"touch /usr/x /etc/x 2> {MESSAGE}; touch /tmp/{pods.namespace} /root/x && ls /tmp >> {MESSAGE}"
    output = await pods.output(script)
    assert output.count("Read-only file system") == 2
    # A checkout below /tmp is there too.
    assert pods.namespace in output.splitlines()[2:]
    assert not (Path("/tmp") / pods.namespace).exists()


async def test_a_read_only_root_is_read_only(pods: Pods) -> None:
    main = {
        "securityContext": {"readOnlyRootFilesystem": True},
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }
    script = f"! touch /x && ! touch /tmp/x && touch /scratch/x && ls /scratch > {MESSAGE}"
    assert await pods.output(script, main=main, volumes=[{"name": "scratch", "emptyDir": {}}]) == "x\n"
