{{/* The HorizontalPodAutoscaler of orchestrators, the KEDA ScaledObject of others; takes what coppice.component made. */}}
{{- define "coppice.autoscaling" -}}
{{- $scaling := .values.autoscaling }}
{{- $metric := printf "coppice_%s" .component.role }}
{{- $labels := printf "{namespace=%q,service=%q}" .root.Release.Namespace .name }}
{{- if eq .component.role "orchestrator" }}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ .name }}
  labels: {{ include "coppice.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ .name }}}
  minReplicas: {{ $scaling.min }}
  maxReplicas: {{ $scaling.max }}
  metrics:
    - type: Resource
      resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ required "orchestrator.autoscaling.cpu: percent of what it requests" $scaling.cpu }}}}
  behavior: {{ include "coppice.behaviour" . | nindent 4 }}
{{- else }}
{{- if not (or $scaling.sessions $scaling.kvTokens) }}{{ fail (printf "%s: autoscaling takes sessions or kvTokens" .component.component) }}{{ end }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels: {{ include "coppice.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ .name }}}
  minReplicaCount: {{ $scaling.min }}
  maxReplicaCount: {{ $scaling.max }}
  fallback: {failureThreshold: 4, replicas: {{ max $scaling.min .values.replicas }}} # while Prometheus is away
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: {{ include "coppice.behaviour" . | nindent 8 }}
  triggers:
    {{- with $scaling.sessions }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $.root.Values.monitoring.prometheus }}
        query: sum({{ $metric }}_sessions_opened_total{{ $labels }}) - sum({{ $metric }}_sessions_closed_total{{ $labels }})
        threshold: {{ quote . }}
    {{- end }}
    {{- with $scaling.kvTokens }}
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $.root.Values.monitoring.prometheus }}
        query: sum({{ $metric }}_kv_tokens_used{{ $labels }})
        threshold: {{ int64 . | quote }}
    {{- end }}
{{- end }}
{{- end }}

{{/* Up at once; down one replica at a time, since its sessions have to be opened elsewhere. */}}
{{- define "coppice.behaviour" -}}
scaleUp: {stabilizationWindowSeconds: 0}
scaleDown:
  stabilizationWindowSeconds: 300
  policies: [{type: Pods, value: 1, periodSeconds: 60}]
{{- end }}

{{/* Who may call a component and whom it may call; everything else is denied (base.yaml), DNS is open to all. */}}
{{- define "coppice.networkPolicy" -}}
{{- $root := .root }}{{ $roles := include "coppice.roles" $root | fromYaml }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ .name }}
  labels: {{ include "coppice.labels" $root | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "coppice.selector" $root | nindent 6 }}
      {{- include "coppice.componentLabels" .component | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    {{- if .component.callers }}
    - ports: [{port: {{ .role.port }}}{{ if eq .component.role "orchestrator" }}, {port: 8000}{{ end }}]
      from:
        {{- range .component.callers }}
        - {{ include "coppice.peer" (list $root .) }}
        {{- end }}
        {{- if eq .component.role "orchestrator" }}{{ toYaml $root.Values.networkPolicy.clients | nindent 8 }}{{ end }}
    {{- end }}
    - ports: [{port: 9090}]
      from: {{ toYaml $root.Values.networkPolicy.prometheus | nindent 8 }}
  egress:
    {{- range .component.calls }}
    - ports: [{port: {{ (index $roles .).port }}}]
      {{- if and (eq . "redis") (not $root.Values.redis.enabled) }}
      {{- with $root.Values.redis.peers }}
      to: {{ toYaml . | nindent 8 }}
      {{- end }}
      {{- else }}
      to:
        - {{ include "coppice.peer" (list $root .) }}
      {{- end }}
    {{- end }}
    {{- range .component.weights }}
    {{- if .hub }}
    - ports: [{port: 443}] # the hub
    {{- break }}
    {{- end }}
    {{- end }}
    {{- with dig "telemetry" "otlp_endpoint" "" $root.Values.settings }}
    - ports: [{port: {{ splitList ":" . | last }}}] # the collector of traces
    {{- end }}
    - ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}
