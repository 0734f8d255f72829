{{/* The KEDA ScaledObject of a component; takes what coppice.component made. All follow the requests that run and wait at
     the orchestrators: what a component itself holds is bounded by its replicas, so full ones would never ask for more. */}}
{{- define "coppice.autoscaling" -}}
{{- $apis := .root.Capabilities.APIVersions }}{{/* every cluster has the first one, `helm template` by itself does not */}}
{{- if and ($apis.Has "apiregistration.k8s.io/v1") (not ($apis.Has "keda.sh/v1alpha1")) }}
{{- fail (printf "%s.autoscaling: this cluster has no KEDA (keda.sh/v1alpha1); install it, or leave autoscaling out and set replicas" .component.component) }}
{{- end }}
{{- $scaling := .values.autoscaling }}
{{- if and $scaling.kvTokens (ne .component.role "verifier") }}{{ fail (printf "%s.autoscaling.kvTokens: verifiers alone report their KV" .component.component) }}{{ end }}
{{- range $signal, $setting := dict "sessions" (list "limits.sessions" 128) "kvTokens" (list "verifier.kv_tokens" 65536) }}
{{- $most := float64 (get $.variables (printf "COPPICE_%s" (first $setting | replace "." "__" | upper)) | default (last $setting)) }}
{{- $threshold := get $scaling $signal | default 0 }}
{{- if and $most (ge (mulf 1.1 $threshold) $most) }}
{{- fail (printf "%s.autoscaling.%s: %v is not below 0.9 of %s (%v), so replicas that are full would ask for no more" $.component.component $signal $threshold (first $setting) $most) }}
{{- end }}
{{- end }}
{{- $orchestrator := include "coppice.series" (list .root "orchestrator") }}
{{- $requests := printf "sum(vllm:num_requests_running{%s}) + sum(vllm:num_requests_waiting{%s})" $orchestrator $orchestrator }}
{{- $signals := list (dict "query" $requests "threshold" (toString $scaling.sessions) "ignoreNullValues" "false") }}
{{- with $scaling.kvTokens }}
{{- $kv := printf "sum(coppice_verifier_kv_tokens_used{%s})" (include "coppice.series" (list $.root "verifier")) }}
{{- $signals = append $signals (dict "query" $kv "threshold" (int64 . | toString)) }}
{{- end }}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  name: {{ .name }}
  labels: {{ include "coppice.labels" .root | nindent 4 }}
spec:
  scaleTargetRef: {name: {{ .name }}}
  minReplicaCount: {{ $scaling.min }}
  maxReplicaCount: {{ $scaling.max }}
  cooldownPeriod: {{ add .values.startupSeconds 300 }} # before the last replica goes; it has to load first
  fallback: # while Prometheus does not answer, or no orchestrator says anything
    failureThreshold: 4
    replicas: {{ max 1 $scaling.min .values.replicas }}
    behavior: currentReplicasIfHigher
  advanced:
    horizontalPodAutoscalerConfig:
      behavior: # up at once; down one replica at a time, since its sessions have to be opened elsewhere
        scaleUp: {stabilizationWindowSeconds: 0}
        scaleDown:
          stabilizationWindowSeconds: 300
          policies: [{type: Pods, value: 1, periodSeconds: 60}]
  triggers:
    {{- $server := dict "serverAddress" .root.Values.monitoring.prometheus }}
    {{- $login := .root.Values.monitoring.prometheusAuth }}
    {{- with $login }}{{ $_ := set $server "authModes" .modes }}{{ end }}
    {{- range $signals }}
    - type: prometheus
      metricType: AverageValue
      metadata: {{ include "coppice.layers" (list $server .) | nindent 8 }}
      {{- with $login }}
      authenticationRef: {name: {{ .name }}, kind: {{ .kind }}}
      {{- end }}
    {{- end }}
{{- end }}

{{/* Labels of the series of a component, of this release alone: (list ROOT COMPONENT). */}}
{{- define "coppice.series" -}}
{{- $root := index . 0 }}
{{- printf "namespace=%q,service=%q" $root.Release.Namespace (printf "%s-%s" (include "coppice.name" $root) (index . 1)) }}
{{- end }}

{{/* The fewest replicas of a component: (list ROOT VALUES). */}}
{{- define "coppice.fewest" -}}
{{- $values := include "coppice.layers" (list (index . 0).Values.defaults (index . 1)) | fromYaml }}
{{- with $values.autoscaling }}{{ .min }}{{ else }}{{ $values.replicas }}{{ end }}
{{- end }}

{{/* Seconds that a rollout may take: to pull the image, to fetch weights and to load them, and an orchestrator waits for
     a verifier that does. */}}
{{- define "coppice.deadline" -}}
{{- $verifier := include "coppice.layers" (list .root.Values.defaults .root.Values.verifier) | fromYaml }}
{{- $loading := eq .component.role "orchestrator" | ternary (max .values.startupSeconds $verifier.startupSeconds) .values.startupSeconds }}
{{- $fetching := .root.Values.models.cache.enabled | ternary 1800 0 }}
{{- range concat (list .root.Values.target) .root.Values.verifier.drafters .component.weights }}
{{- if .hub }}{{ $fetching = 1800 }}{{ end }}
{{- end }}
{{- add $loading 600 $fetching }}
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
    - ports: {{ include "coppice.dns" $root }}
{{- end }}
