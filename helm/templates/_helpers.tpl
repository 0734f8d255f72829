{{/* What every object's name begins with: nameOverride or the release's, of a long one 21 letters and a hash. */}}
{{- define "coppice.name" -}}
{{- $name := .Values.nameOverride | default .Release.Name }}
{{- le (len $name) 30 | ternary $name (printf "%s-%s" ($name | trunc 21 | trimSuffix "-") (sha256sum $name | trunc 8)) }}
{{- end }}

{{- define "coppice.selector" -}}
app.kubernetes.io/name: coppice
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "coppice.labels" -}}
{{ include "coppice.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The services: what runs, the gRPC service whose health is readiness, the port, and the section of settings with the
     device it computes on. */}}
{{- define "coppice.roles" -}}
verifier: {module: services.verifier, service: coppice.v1.VerifierService, port: 50052, computes: verifier}
drafter: {module: services.drafter, service: coppice.v1.DrafterService, port: 50053, computes: drafter}
orchestrator: {module: orchestrator, service: coppice.v1.GenerationService, port: 50051}
adapter: {module: services.adapter, service: coppice.v1.AdapterService, port: 50061, computes: adapter}
redis: {port: {{ .Values.redis.port }}}
{{- end }}

{{/* Kinds of heads that read the target's features, those of plug-ins among them. */}}
{{- define "coppice.featureKinds" -}}
{{- $kinds := list "eagle3" "specblock" "dflash" "jetspec" "dspark" "mtp" }}
{{- range $kind, $has := .Values.plugins }}{{ if $has.features }}{{ $kinds = append $kinds $kind }}{{ end }}{{ end }}
{{- toJson $kinds }}
{{- end }}

{{/* Fail over a head whose kind neither Coppice has nor `plugins`: (list ROOT HEAD). */}}
{{- define "coppice.checkKind" -}}
{{- $head := index . 1 }}{{ $kinds := concat (list "bigram" "lookup" "lm") (include "coppice.featureKinds" (index . 0) | fromJsonArray) (keys (index . 0).Values.plugins) }}
{{- if not (has $head.kind $kinds) }}{{ fail (printf "head %s: %s is no kind; there are %s" $head.name $head.kind (uniq $kinds | sortAlpha | join ", ")) }}{{ end }}
{{- end }}

{{/* Every replica of every head, NAME=PLACE, of those in the verifiers' processes first: (list ROOT ADAPTED), the latter
     whether only heads that the adapter trains are meant. */}}
{{- define "coppice.heads" -}}
{{- $root := index . 0 }}{{ $adapted := index . 1 }}
{{- range $root.Values.verifier.drafters }}
{{- if or .adapt (not $adapted) }}
- {{ .name }}={{ include "coppice.place" (list $root "verifier" "verifier") }}
{{- end }}
{{- end }}
{{- range $root.Values.drafters }}
{{- if or .adapt (not $adapted) }}
- {{ .name }}={{ include "coppice.place" (list $root (printf "drafter-%s" .name) "drafter") }}
{{- end }}
{{- end }}
{{- end }}

{{/* Mappings laid over one another by key, the later ones above; not sprig's merge, which loses 0 and false. */}}
{{- define "coppice.layers" -}}
{{- $all := dict }}
{{- range . }}{{ range $key, $value := . }}{{ $_ := set $all $key $value }}{{ end }}{{ end }}
{{- toYaml $all }}
{{- end }}

{{/* A component's values, over those of `defaults`: (list ROOT VALUES NAME). */}}
{{- define "coppice.values" -}}
{{- $values := include "coppice.layers" (list (index . 0).Values.defaults (index . 1)) | fromYaml }}
{{- with $values.autoscaling }}
{{- if gt (int .min) (int .max) }}{{ fail (printf "%s.autoscaling: min %v is above max %v" (index $ 2) .min .max) }}{{ end }}
{{- if and (eq (int .min) 0) (or (eq (index $ 2) "orchestrator") (index $ 0).Values.rayService.enabled) }}
{{- fail (printf "%s.autoscaling.min: 0 is for verifiers and drafters, without rayService: an orchestrator has to be there to see a request" (index $ 2)) }}
{{- end }}
{{- end }}
{{- toYaml $values }}
{{- end }}

{{/* Environment variables of settings {SECTION: {NAME: VALUE}} laid over one another: strings as they are, else JSON. */}}
{{- define "coppice.variables" -}}
{{- $all := dict }}
{{- range . }}{{ range $section, $settings := . }}{{ range $name, $value := $settings }}
{{- $_ := set $all (printf "COPPICE_%s__%s" $section $name | upper) (kindIs "string" $value | ternary $value (toJson $value)) }}
{{- end }}{{ end }}{{ end }}
{{- toYaml $all }}
{{- end }}

{{/* Settings of what a component computes on: (list ROLE GPUS). A verifier's target has a rank on each GPU. */}}
{{- define "coppice.device" -}}
{{- $gpus := int (index . 1) }}
device: {{ gt $gpus 0 | ternary "cuda" "cpu" }}
{{- if and (eq (index . 0) "verifier") (gt $gpus 1) }}
ranks: {{ $gpus }}
{{- end }}
{{- end }}

{{/* What clients call the target, with commas between. */}}
{{- define "coppice.targetName" -}}
{{- with .Values.target.name | default .Values.target.hub }}{{ kindIs "slice" . | ternary . (list .) | join "," }}{{ end }}
{{- end }}

{{/* Where the replicas of a component are found: (list ROOT COMPONENT ROLE). */}}
{{- define "coppice.place" -}}
{{- $root := index . 0 }}
{{- $role := index (include "coppice.roles" $root | fromYaml) (index . 2) }}
{{- eq $root.Values.discovery "redis" | ternary "redis" (printf "dns:%s-%s:%v" (include "coppice.name" $root) (index . 1) $role.port) }}
{{- end }}

{{/* Variables with the URL of Redis for sections of settings: (list ROOT SECTION...). */}}
{{- define "coppice.redis" -}}
{{- $redis := (first .).Values.redis }}{{ $scheme := (first .).Values.tls.enabled | ternary "rediss" "redis" }}
{{- $secret := required "redis.secret: the name of a Secret" $redis.secret }}
{{- if $redis.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: password}}
{{- end }}
{{- range rest . }}
- name: COPPICE_{{ upper . }}__REDIS
  {{- if $redis.enabled }}
  value: {{ $scheme }}://:$(REDIS_PASSWORD)@{{ include "coppice.name" (first $) }}-redis:{{ $redis.port }}/0{{ eq $scheme "rediss" | ternary "?ssl_ca_certs=/tls/ca.crt" "" }}
  {{- else }}
  valueFrom: {secretKeyRef: {name: {{ $secret }}, key: url}}
  {{- end }}
{{- end }}
{{- end }}

{{/* The Secret with a role's certificate: (list ROOT ROLE). */}}
{{- define "coppice.tlsSecret" -}}
{{- $root := index . 0 }}{{ $role := index . 1 }}
{{- if $root.Values.tls.secrets }}
{{- required (printf "tls.secrets.%s: the name of a Secret" $role) (get $root.Values.tls.secrets $role) }}
{{- else }}
{{- include "coppice.name" $root }}-{{ $role }}-tls
{{- end }}
{{- end }}

{{/* The image: (list ROOT GPUS). */}}
{{- define "coppice.image" -}}
{{- $root := index . 0 }}{{ $image := $root.Values.image }}{{ $variant := index . 1 | ternary "cuda" "cpu" }}
{{- with $image.registry }}{{ . }}/{{ end }}{{ $image.repository }}:{{ $image.tag | default $root.Chart.AppVersion }}-{{ $variant }}
{{- with get $image.digest $variant }}@{{ . }}{{ end }}
{{- end }}

{{/* What a component's values say of its pod that the chart says nothing of; affinity, runtimeClassName and so on. */}}
{{- define "coppice.podValues" -}}
{{- with pick . "affinity" "nodeSelector" "priorityClassName" "runtimeClassName" "schedulerName" }}
{{- range $key, $value := . }}{{ if $value }}
{{ $key }}: {{ toJson $value }}
{{- end }}{{ end }}
{{- end }}
{{- if or .gpu .tolerations }}
tolerations:
  {{- if .gpu }}
  - {key: {{ .gpuResource }}, operator: Exists, effect: NoSchedule}
  {{- end }}
  {{- with .tolerations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
{{- end }}

{{/* The ports of DNS, as a list for egress. */}}
{{- define "coppice.dns" -}}
[{port: 53, protocol: UDP}, {port: 53, protocol: TCP}{{ range .Values.networkPolicy.dnsPorts }}, {port: {{ . }}, protocol: UDP}, {port: {{ . }}, protocol: TCP}{{ end }}]
{{- end }}

{{/* Who a pod is and what it may do; every container adds coppice.container. */}}
{{- define "coppice.pod" -}}
serviceAccountName: {{ .Values.serviceAccount.name | default (include "coppice.name" .) }}
automountServiceAccountToken: false
enableServiceLinks: false # COPPICE_... variables that are no settings are errors
securityContext: {{ toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* What a container takes that only fetches, waits or asks. */}}
{{- define "coppice.small" -}}
resources: {requests: {cpu: 100m, memory: 256Mi}, limits: {memory: 2Gi}}
{{- end }}

{{/* The volume of files that may be lost. */}}
{{- define "coppice.tmp" -}}
{name: tmp, emptyDir: {sizeLimit: 16Gi}}
{{- end }}

{{- define "coppice.container" -}}
securityContext: {{ toYaml .Values.securityContext | nindent 2 }}
{{- end }}

{{/* A NetworkPolicy peer: the pods of a role, (list ROOT ROLE). */}}
{{- define "coppice.peer" -}}
{{- $labels := set (include "coppice.selector" (index . 0) | fromYaml) "app.kubernetes.io/component" (index . 1) }}
{{- dict "podSelector" (dict "matchLabels" $labels) | toJson }}
{{- end }}
