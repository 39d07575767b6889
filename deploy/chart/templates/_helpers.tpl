{{- define "pomona.labels" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pomona
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- /* What selects the controller's pods: fixed, because a Deployment's selector cannot be changed. */}}
{{- define "pomona.selector" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/component: controller
{{- end }}

{{- define "pomona.nodeAgentSelector" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/component: node-agent
{{- end }}

{{- define "pomona.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end }}

{{- /* Macs belong to the whole cluster: a controller of some namespaces has none. */}}
{{- define "pomona.hosts" -}}
{{- if and .Values.hosts.enabled (not .Values.scope.namespaces) -}}true{{- end -}}
{{- end }}

{{- /* Nodes belong to the whole cluster, too. */}}
{{- define "pomona.nodeAgents" -}}
{{- if and .Values.nodeAgent.enabled (not .Values.scope.namespaces) -}}true{{- end -}}
{{- end }}

{{- /* So does the gateway, which the whole cluster shares. */}}
{{- define "pomona.gateway" -}}
{{- if and .Values.gateway.enabled (not .Values.scope.namespaces) -}}true{{- end -}}
{{- end }}

{{- /* The Secrets with the tokens of services, as crds/meta.py names them. */}}
{{- define "pomona.gatewayShards" -}}
{{- range until 8 }}
- pomona-gateway-{{ . }}
{{- end }}
{{- end }}

{{- define "pomona.gatewaySelector" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/component: gateway
{{- end }}

{{- define "pomona.schedulerSelector" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/component: scheduler
{{- end }}

{{- define "pomona.consoleSelector" -}}
app.kubernetes.io/name: pomona
app.kubernetes.io/component: console
{{- end }}

{{- /* Kube-scheduler of the version of the cluster, without the suffix of a provider. */}}
{{- define "pomona.schedulerImage" -}}
{{- .Values.scheduler.image | default (printf "registry.k8s.io/kube-scheduler:%s" (regexFind "^v[0-9]+[.][0-9]+[.][0-9]+" .Capabilities.KubeVersion.Version)) -}}
{{- end }}

{{- define "pomona.schedulerConfiguration" -}}
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection:
  leaderElect: true
  resourceName: pomona-scheduler
  resourceNamespace: pomona-system
profiles:
  - schedulerName: {{ .Values.scheduler.name }}
extenders:
  - urlPrefix: http://127.0.0.1:8888
    filterVerb: filter
    prioritizeVerb: prioritize
    weight: 15
    enableHTTPS: false
    httpTimeout: 200ms
    nodeCacheCapable: true
    ignorable: true
    managedResources:
      {{- range .Values.scheduler.managedResources }}
      - name: {{ . }}
      {{- end }}
{{- end }}

{{- /* A file of rules or a dashboard, with the names that begin with metrics.prefix, and the page of the runbooks. */}}
{{- define "pomona.monitoring" -}}
{{- regexReplaceAll "\\bpomona_(gpu_|node_agent_|tokens_per_second|model_load_seconds|latency_p95_seconds)" (.root.Files.Get .file) (printf "%s_${1}" .root.Values.metrics.prefix) | replace "https://github.com/pomona-dev/pomona/blob/main/docs/metrics.md" .root.Values.metrics.rules.runbookUrl -}}
{{- end }}
