{{/* The pod of a component; takes what coppice.component made. */}}
{{- define "coppice.podSpec" -}}
{{- $root := .root }}{{ $values := .values }}{{ $component := .component }}
{{- $models := $root.Values.models }}
{{- $image := include "coppice.image" (list $root (gt (int $values.gpu) 0)) }}
{{- $fetched := include "coppice.fetched" (list $root $component.weights) | fromYamlArray }}
{{- include "coppice.pod" $root }}
terminationGracePeriodSeconds: {{ add 15 (ceil (float64 .variables.COPPICE_SERVER__GRACE_S)) }}
topologySpreadConstraints: # replicas on different nodes where that is possible
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "coppice.selector" $root | nindent 8 }}
        {{- include "coppice.componentLabels" $component | nindent 8 }}
{{- $cached := and $component.weights $models.cache.enabled }}
{{- if $cached }}{{ $_ := set $values "affinity" (include "coppice.affinity" (list $root $values.affinity $component.role) | fromYaml) }}{{ end }}
{{- include "coppice.podValues" $values }}
{{- if or $fetched $cached (eq $component.role "orchestrator") }}
initContainers:
  {{- include "coppice.fetch" (list $root $fetched $image $values) | nindent 2 }}
  {{- if $cached }}{{ include "coppice.waitForModels" (list $root $image) | nindent 2 }}{{ end }}
  {{- if eq $component.role "orchestrator" }}
  - name: wait # it gives up after 30 s without a verifier, which may take minutes to load
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [sh, -c, 'until getent hosts "$0"; do sleep 2; done', {{ include "coppice.name" $root }}-verifier]
    {{- include "coppice.small" . | nindent 4 }}
    {{- include "coppice.container" $root | nindent 4 }}
  {{- end }}
{{- end }}
containers:
  - name: {{ $component.role }}
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command: [python, -m, {{ .role.module }}]
    {{- with $values.extraArgs }}
    args: {{ toJson . }}
    {{- end }}
    env:
      {{- range $variable, $value := .variables }}
      - {name: {{ $variable }}, value: {{ quote $value }}}
      {{- end }}
      - {name: COPPICE_SERVER__ADVERTISE, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
      {{- with $component.redis }}{{ include "coppice.redis" (prepend . $root) | nindent 6 }}{{ end }}
      {{- with $values.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- with $values.envFrom }}
    envFrom: {{ toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - {name: grpc, containerPort: {{ .role.port }}}
      - {name: health, containerPort: 8081}
      - {name: metrics, containerPort: 9090}
      {{- if eq $component.role "orchestrator" }}
      - {name: http, containerPort: 8000}
      {{- end }}
    startupProbe: # nothing listens before the weights are loaded
      grpc: {port: 8081, service: {{ .role.service }}}
      periodSeconds: 5
      failureThreshold: {{ max 1 (div $values.startupSeconds 5) }}
    readinessProbe: # false while it drains
      {{- /* Where there may be no verifier, an orchestrator has to be ready all the same: its requests start one. */}}
      {{- $open := and (eq (get .variables "COPPICE_TLS__REQUIRE" | default "false" | lower) "false") (ne (include "coppice.fewest" (list $root $root.Values.verifier)) "0") }}
      {{- if and $open (hasKey .variables "COPPICE_ORCHESTRATOR__HTTP_PORT") }}
      httpGet: {path: /ready, port: http, scheme: {{ $root.Values.tls.enabled | ternary "HTTPS" "HTTP" }}} # also while no verifier can be asked
      {{- else }}
      grpc: {port: 8081, service: {{ .role.service }}}
      {{- end }}
      periodSeconds: 5
      timeoutSeconds: 2
    livenessProbe:
      grpc: {port: 8081}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    lifecycle: {preStop: {exec: {command: [sleep, "5"]}}} # endpoints forget it before it refuses anybody
    resources: {{ include "coppice.resources" $values | nindent 6 }}
    {{- include "coppice.container" $root | nindent 4 }}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
      {{- if gt (int $values.gpu) 1 }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- if and $component.weights (or $models.claim $models.cache.enabled $fetched) }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
      {{- if $root.Values.tls.enabled }}
      - {name: tls, mountPath: /tls, readOnly: true}
      {{- end }}
      {{- if $values.tokensSecret }}
      - {name: tokens, mountPath: /tokens, readOnly: true}
      {{- end }}
      {{- if $values.storage }}
      - {name: versions, mountPath: /versions}
      {{- end }}
      {{- with $values.extraVolumeMounts }}{{ toYaml . | nindent 6 }}{{ end }}
volumes:
  - {{ include "coppice.tmp" . }}
  {{- if gt (int $values.gpu) 1 }}
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}} # through which NCCL's ranks meet; it counts as the pod's memory
  {{- end }}
  {{- if $fetched }}
  - {name: models, emptyDir: {sizeLimit: {{ $models.size }}}}
  {{- else if and $component.weights (or $models.claim $models.cache.enabled) }}
  - {name: models, persistentVolumeClaim: {claimName: {{ include "coppice.modelsClaim" $root }}, readOnly: true}}
  {{- end }}
  {{- if $root.Values.tls.enabled }}
  - {name: tls, secret: {secretName: {{ include "coppice.tlsSecret" (list $root $component.role) }}, defaultMode: 0440}}
  {{- end }}
  {{- with $values.tokensSecret }}
  - {name: tokens, secret: {secretName: {{ . }}, items: [{key: tokens, path: tokens}], defaultMode: 0440}}
  {{- end }}
  {{- with $values.storage }}
  - {name: versions, persistentVolumeClaim: {claimName: {{ .claim | default $.name }}}}
  {{- end }}
  {{- with $values.extraVolumes }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}

{{/* Those weights that a pod itself fetches from the hub: (list ROOT WEIGHTS). */}}
{{- define "coppice.fetched" -}}
{{- $fetched := list }}{{ $models := (index . 0).Values.models }}
{{- range index . 1 }}{{ if .hub }}{{ $fetched = append $fetched . }}{{ end }}{{ end }}
{{- if and $fetched $models.claim }}{{ fail "models.claim and hub exclude each other without models.cache.enabled: the volume is mounted read-only" }}{{ end }}
{{- toYaml $fetched }}
{{- end }}

{{/* All that models.yaml downloads: the weights of every component that the hub has. */}}
{{- define "coppice.downloads" -}}
{{- $downloads := list }}
{{- range concat (list .Values.target) .Values.verifier.drafters .Values.drafters }}
{{- if .hub }}{{ $downloads = append $downloads (pick . "hub" "path" "revision") }}{{ end }}
{{- end }}
{{- toYaml (uniq $downloads) }}
{{- end }}

{{/* The container that waits for the Job of models.yaml: (list ROOT IMAGE). */}}
{{- define "coppice.waitForModels" -}}
- name: wait-for-models
  image: {{ index . 1 }}
  imagePullPolicy: {{ (index . 0).Values.image.pullPolicy }}
  command: [sh, -c, 'until test -e "$0"; do sleep 2; done', {{ include "coppice.fetchedMark" (index . 0) }}]
  {{- include "coppice.small" . | nindent 2 }}
  {{- include "coppice.container" (index . 0) | nindent 2 }}
  volumeMounts: [{name: models, mountPath: /models, readOnly: true}]
{{- end }}

{{/* The file that says that all of them are there, and the claim that holds them. */}}
{{- define "coppice.fetchedMark" -}}
/models/.fetched-{{ include "coppice.downloads" . | sha256sum | trunc 12 }}
{{- end }}
{{- define "coppice.modelsClaim" -}}
{{ .Values.models.claim | default (printf "%s-models" (include "coppice.name" .)) }}
{{- end }}

{{/* The affinity of a pod with weights of the cache. A volume of one node holds them together: all run beside a verifier,
     which needs the GPU, and a verifier where the volume is mounted: (list ROOT AFFINITY ROLE). */}}
{{- define "coppice.affinity" -}}
{{- $root := index . 0 }}{{ $beside := dict }}
{{- if include "coppice.oneNode" $root }}
{{- $label := eq (index . 2) "verifier" | ternary (dict "coppice/weights" "cache") (dict "app.kubernetes.io/component" "verifier") }}
{{- $labels := merge $label (include "coppice.selector" $root | fromYaml) }}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) }}
{{- $beside = dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term)) }}
{{- end }}
{{- include "coppice.layers" (list $beside (index . 1)) }}
{{- end }}
{{- define "coppice.oneNode" -}}
{{ and (not .Values.models.claim) (eq .Values.models.cache.accessMode "ReadWriteOnce") | ternary "true" "" }}
{{- end }}

{{/* Containers that fetch them into the volume `models`: (list ROOT FETCHED IMAGE VALUES), the last for env. */}}
{{- define "coppice.fetch" -}}
{{- $root := index . 0 }}
{{- range $number, $each := index . 1 }}
- name: fetch-{{ $number }}
  image: {{ index $ 2 }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  command: [coppice, fetch, {{ quote .hub }}, --link, {{ quote .path }}, --part, {{ .part | default "all" }}]
  {{- with .revision }}
  args: [--revision, {{ quote . }}]
  {{- end }}
  env:
    - {name: HF_HOME, value: /models/.hub}
    {{- with $root.Values.models.tokenSecret }}
    - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: {{ . }}, key: token}}}
    {{- end }}
    {{- with (index $ 3).env }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- with (index $ 3).envFrom }}
  envFrom: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- include "coppice.small" $root | nindent 2 }}
  {{- include "coppice.container" $root | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
    - {name: models, mountPath: /models}
    {{- with (index $ 3).extraVolumeMounts }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end }}
{{- end }}

{{/* Resources with the GPUs in their limits; takes {resources, gpu, gpuResource}. */}}
{{- define "coppice.resources" -}}
{{- $gpu := gt (int .gpu) 0 | ternary (dict .gpuResource .gpu) dict }}
{{- $limits := dict "limits" (include "coppice.layers" (list (dig "limits" dict .resources) $gpu) | fromYaml) }}
{{- include "coppice.layers" (list .resources $limits) }}
{{- end }}
