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
