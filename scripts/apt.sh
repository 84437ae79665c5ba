# shellcheck shell=bash
# Sourced by setup.sh: apt with the distribution's own repositories only.
#
# A host may have third-party repositories that are slow, unsigned or gone. Every apt call here therefore uses a
# private list with the distribution's own entries, copied from the host's configuration.

apt_root=${FORKD_APT_ROOT:-/etc/apt}

# Prints the host's apt entries, one line per URI: `URI|suite,suite|component,component|signed-by|architectures`.
# Reads both formats: deb822 (*.sources) and one line per entry (sources.list, *.list). Skips disabled entries.
apt_entries() {
    local file
    for file in "$apt_root"/sources.list.d/*.sources; do
        [ -r "$file" ] || continue
        awk -v RS= '
            {
                n = split($0, lines, "\n"); types = uris = suites = comps = key = arch = ""; enabled = 1; field = ""
                for (i = 1; i <= n; i++) {
                    line = lines[i]
                    if (line ~ /^#/) continue
                    if (line ~ /^[ \t]/) value = line
                    else { field = tolower(substr(line, 1, index(line, ":") - 1)); value = substr(line, index(line, ":") + 1) }
                    gsub(/^[ \t]+|[ \t]+$/, "", value); gsub(/[ \t]+/, " ", value)
                    if (value == "") continue
                    if (field == "types") types = types " " value
                    if (field == "uris") uris = uris " " value
                    if (field == "suites") suites = suites " " value
                    if (field == "components") comps = comps " " value
                    if (field == "architectures") arch = arch " " value
                    # A key may be inline text of many lines. Only a file name can be copied.
                    if (field == "signed-by" && key == "") key = value
                    if (field == "enabled" && tolower(value) ~ /^(no|false|0|off)$/) enabled = 0
                }
                if (!enabled || (" " types " ") !~ / deb /) next
                if (key !~ /^\//) key = ""
                m = split(uris, u, " "); gsub(/^ | $/, "", suites); gsub(/^ | $/, "", comps); gsub(/^ | $/, "", arch)
                gsub(/ /, ",", suites); gsub(/ /, ",", comps); gsub(/ /, ",", arch)
                for (j = 1; j <= m; j++) print u[j] "|" suites "|" comps "|" key "|" arch
            }' "$file"
    done
    for file in "$apt_root"/sources.list "$apt_root"/sources.list.d/*.list; do
        [ -r "$file" ] || continue
        awk '
            $1 == "deb" {
                sub(/#.*/, ""); key = arch = ""
                if (match($0, /\[[^]]*\]/)) {
                    options = substr($0, RSTART + 1, RLENGTH - 2)
                    $0 = substr($0, 1, RSTART - 1) substr($0, RSTART + RLENGTH)
                    n = split(options, o, " ")
                    for (i = 1; i <= n; i++) {
                        if (o[i] ~ /^signed-by=\//) key = substr(o[i], 11)
                        if (o[i] ~ /^arch=/) arch = substr(o[i], 6)
                    }
                }
                comps = $4
                for (i = 5; i <= NF; i++) comps = comps "," $i
                print $2 "|" $3 "|" comps "|" key "|" arch
            }' "$file"
    done
}

in_list() { case ",$2," in *,"$1",*) return 0 ;; *) return 1 ;; esac }

# Scores how well an entry matches the archive of distribution $1, release $2. Other publishers use the same suite
# names.
apt_score() {
    local id=$1 codename=$2 uri=$3 suites=$4 comps=$5 key=$6 points=0
    in_list "$codename" "$suites" || { printf 0; return; }
    in_list main "$comps" || { printf 0; return; }
    points=1
    case ${uri%/} in */"$id") points=$((points + 2)) ;; esac
    case $key in *"$id"-archive-*) points=$((points + 2)) ;; esac
    if in_list "$codename-updates" "$suites"; then points=$((points + 1)); fi
    printf '%s' "$points"
}

# The entry of the distribution's archive, in the format of apt_entries.
apt_archive() {
    local id=$1 codename=$2 best=0 found="" uri suites comps key arch points
    while IFS='|' read -r uri suites comps key arch; do
        points=$(apt_score "$id" "$codename" "$uri" "$suites" "$comps" "$key")
        if [ "$points" -gt "$best" ]; then best=$points found="$uri|$suites|$comps|$key|$arch"; fi
    done < <(apt_entries)
    [ -n "$found" ] || return 1
    printf '%s\n' "$found"
}

apt_stanza() {
    local uri=$1 suites=$2 comps=$3 key=$4 arch=${5:-}
    printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: %s\n' "$uri" "${suites//,/ }" "${comps//,/ }"
    if [ -n "$key" ]; then printf 'Signed-By: %s\n' "$key"; fi
    if [ -n "$arch" ]; then printf 'Architectures: %s\n' "${arch//,/ }"; fi
    printf '\n'
}

# Writes the distribution's own entries to directory $3: the archive, its updates, its security suite.
apt_own_sources() {
    local id=$1 codename=$2 dir=$3 archive archive_uri uri suites comps key arch suite
    archive=$(apt_archive "$id" "$codename") || return 1
    archive_uri=${archive%%|*}
    while IFS='|' read -r uri suites comps key arch; do
        for suite in "" -updates -security -backports; do
            in_list "$codename$suite" "$suites" || continue
            [ "$uri" = "$archive_uri" ] || [ "$suite" = -security ] || [ "$suite" = -updates ] || continue
            apt_stanza "$uri" "$suites" "$comps" "$key" "$arch"
            break
        done
    done < <(apt_entries) >"$dir/forkd.sources"
}

# Whether suite $1 is configured on the host, in any file.
apt_has_suite() {
    local suites
    while IFS='|' read -r _ suites _ _ _; do
        if in_list "$1" "$suites"; then return 0; fi
    done < <(apt_entries)
    return 1
}

# Adds the backports suite of the host's own mirror, unless it is configured already.
apt_add_backports() {
    local id=$1 codename=$2 archive uri key arch file
    if apt_has_suite "$codename-backports"; then return 0; fi
    archive=$(apt_archive "$id" "$codename") || return 1
    IFS='|' read -r uri _ _ key arch <<<"$archive"
    file=$apt_root/sources.list.d/forkd-backports.sources
    say "    adding $codename-backports from $uri to $file"
    apt_stanza "$uri" "$codename-backports" main "$key" "$arch" >"$file.new"
    mv "$file.new" "$file"
}

# Runs apt with only the entries in directory $1.
apt_with() {
    local dir=$1
    shift
    DEBIAN_FRONTEND=noninteractive apt-get -q -y \
        -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$dir" \
        -o APT::Get::List-Cleanup=0 -o DPkg::Lock::Timeout=900 -o Acquire::Retries=3 "$@"
}
