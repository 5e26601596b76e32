{{- /* What the templates share. */ -}}

{{- define "moonpool.labels" -}}
{ app.kubernetes.io/name: moonpool, app.kubernetes.io/instance: {{ .Release.Name }} }
{{- end }}

{{- define "moonpool.options" -}}
- --sandbox={{ .Values.sandbox }}
- --exit-timeout-secs={{ .Values.seconds.exit }}
# A pod that cannot load a model at its start ends, and stops the rollout. Later, one broken model
# does not take the others out of service.
- --exit-on-error=true
- --strict-readiness=false
- --log-format=json
{{- range .Values.args }}
- {{ . | quote }}
{{- end }}
{{- end }}

{{- /* The argument is the port, by number or name. */ -}}
{{- define "moonpool.probes" -}}
# Connections are refused until the models are loaded: ten minutes at most.
startupProbe:
  httpGet: { path: /v2/health/live, port: {{ . }} }
  periodSeconds: 2
  failureThreshold: 300
livenessProbe:
  httpGet: { path: /v2/health/live, port: {{ . }} }
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: { path: /v2/health/ready, port: {{ . }} }
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{- define "moonpool.lifecycle" -}}
lifecycle:
  # Time for the Service to forget the pod before the server refuses connections.
  preStop: { exec: { command: [sleep, {{ .Values.seconds.forget | quote }}] } }
{{- end }}

{{- define "moonpool.grace" -}}
# The preStop hook, --exit-timeout-secs, and MOONPOOL_FINALIZE_TIMEOUT_S of the slowest model (30 by
# default) together, with time to spare.
terminationGracePeriodSeconds: {{ .Values.seconds.grace }}
automountServiceAccountToken: false
{{- end }}

{{- define "moonpool.container-security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "moonpool.user" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "moonpool.resources" -}}
resources:
  requests: {{ toJson .Values.resources.requests }}
  # Shared memory of requests and responses counts, too.
  limits: {{ toJson .Values.resources.limits }}
{{- end }}

{{- define "moonpool.scratch" -}}
- name: scratch
  emptyDir: { sizeLimit: {{ .Values.scratch }} }
{{- end }}

{{- define "moonpool.places" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}
