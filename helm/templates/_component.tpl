{{/*
One component: its Deployment, Service, PodDisruptionBudget, autoscaling, NetworkPolicy and ServiceMonitor. Takes a dict:
  root      the chart's $
  role      a key of coppice.roles
  component what its objects' names end with: the role, for a pool drafter-NAME
  values    its values; those of `defaults` hold where it has none
  settings  settings that the chart makes for it; those in values win
  calls     roles that it calls
  callers   roles that call it
  weights   list of {path, hub, revision} that it reads
  redis     sections of settings that are to hold the URL of Redis
*/}}
{{- define "coppice.component" -}}
{{- $root := .root }}
{{- $values := include "coppice.values" (list $root .values .component) | fromYaml }}
{{- if eq .role "adapter" }}{{ $_ := unset $values "autoscaling" }}{{ end }}
{{- $role := index (include "coppice.roles" $root | fromYaml) .role }}
{{- if $root.Values.models.cache.enabled }} {{- /* the Job fetches */}}
{{- $local := list }}{{ range .weights }}{{ $local = append $local (omit . "hub") }}{{ end }}{{ $_ := set . "weights" $local }}
{{- end }}
{{- $name := printf "%s-%s" (include "coppice.name" $root) .component }}
{{- $tls := $root.Values.tls.enabled | ternary (dict "ca" "/tls/ca.crt" "cert" "/tls/tls.crt" "key" "/tls/tls.key") dict }}
{{- $server := dict "host" "0.0.0.0" "port" $role.port "health_port" 8081 "metrics_port" 9090 "log_json" true "production" true "grace_s" 90 }}
{{- $own := dict "server" $server "tls" $tls }}
{{- if $role.computes }}
{{- $_ := set $own $role.computes (include "coppice.device" (list .role $values.gpu) | fromYaml) }}
{{- end }}
{{- $variables := include "coppice.variables" (list $own .settings $root.Values.settings $values.settings) | fromYaml }}
{{- if and $values.tokensSecret (not $root.Values.tls.enabled) (ne (get $variables "COPPICE_TLS__TOKENS_IN_CLEAR" | lower) "true") }}
{{- fail "orchestrator.tokensSecret: clients would send tokens without TLS; set tls.enabled, or settings.tls.tokens_in_clear where a mesh encrypts" }}
{{- end }}
{{- $context := dict "root" $root "name" $name "role" $role "values" $values "variables" $variables "component" . }}
{{- $labels := include "coppice.componentLabels" . }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ $name }}
  labels:
    {{- include "coppice.labels" $root | nindent 4 }}
    {{- $labels | nindent 4 }}
spec:
  {{- if not $values.autoscaling }}
  replicas: {{ $values.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "coppice.selector" $root | nindent 6 }}
      {{- $labels | nindent 6 }}
  {{- if eq .role "adapter" }}
  strategy: {type: Recreate} # its volume may be of one node
  {{- else if $values.gpu }}
  strategy: {rollingUpdate: {maxSurge: 0, maxUnavailable: 1}} # a spare GPU is not taken for granted
  {{- else }}
  strategy: {rollingUpdate: {maxSurge: 1, maxUnavailable: 0}}
  {{- end }}
  minReadySeconds: 30 # until DNS caches know the new replica, before the next one is replaced
  progressDeadlineSeconds: {{ include "coppice.deadline" $context }}
  template:
    metadata:
      labels:
        {{- include "coppice.labels" $root | nindent 8 }}
        {{- $labels | nindent 8 }}
        {{- if and .weights $root.Values.models.cache.enabled }}
        coppice/weights: cache
        {{- end }}
        {{- with $values.podLabels }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with $values.podAnnotations }}
      annotations: {{ toYaml . | nindent 8 }}
      {{- end }}
    spec:
      {{- include "coppice.podSpec" $context | nindent 6 }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ $name }}
  labels:
    {{- include "coppice.labels" $root | nindent 4 }}
    {{- $labels | nindent 4 }}
spec:
  clusterIP: None # callers choose among the replicas themselves
  selector:
    {{- include "coppice.selector" $root | nindent 4 }}
    {{- $labels | nindent 4 }}
  ports:
    - {name: grpc, port: {{ $role.port }}, targetPort: grpc, appProtocol: grpc}
    - {name: metrics, port: 9090, targetPort: metrics}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name }}
  labels: {{ include "coppice.labels" $root | nindent 4 }}
spec:
  maxUnavailable: 1
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "coppice.selector" $root | nindent 6 }}
      {{- $labels | nindent 6 }}
{{- if $values.autoscaling }}
---
{{ include "coppice.autoscaling" $context }}
{{- end }}
{{- if $root.Values.networkPolicy.enabled }}
---
{{ include "coppice.networkPolicy" $context }}
{{- end }}
{{- if $root.Values.monitoring.serviceMonitor }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ $name }}
  labels:
    {{- include "coppice.labels" $root | nindent 4 }}
    {{- with $root.Values.monitoring.labels }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  selector:
    matchLabels:
      {{- include "coppice.selector" $root | nindent 6 }}
      {{- $labels | nindent 6 }}
  endpoints:
    - {port: metrics, interval: 15s}
{{- end }}
{{- end }}

{{/* Labels that tell a component's pods from all others. */}}
{{- define "coppice.componentLabels" -}}
app.kubernetes.io/component: {{ .role }}
{{- if eq .role "drafter" }}
coppice/pool: {{ .values.name }}
{{- end }}
{{- end }}
