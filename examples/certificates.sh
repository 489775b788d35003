#!/bin/sh
# Makes an authority and certificates for a trial of mutual TLS, by openssl 3: keys are not encrypted.
#
#   certificates.sh tls 127.0.0.1 billing                   tls/ca.pem, and 127.0.0.1 and billing, .pem and .key of each
#   certificates.sh tls node-1=replica-1,10.0.0.1           node-1, which is reached under two names
#   DAYS=365 certificates.sh tls billing                    for a year; 30 days without DAYS
#
# The first call makes the authority; later ones use it to add or renew certificates. Each file is replaced by a rename.
set -eu
mkdir -p "$1"
cd "$1"
shift
umask 077
DAYS=${DAYS:-30}
new_key="-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"

if [ ! -e ca.pem ]; then
    openssl req -x509 $new_key -keyout ca.key -out ca.pem -days "$DAYS" -subj "/CN=pushrep trial" \
        -addext "keyUsage=critical,digitalSignature,keyCertSign,cRLSign"
fi
for one in "$@"; do
    name=${one%%=*}
    names=
    for host in $(echo "${one#*=}" | tr , ' '); do
        case $host in
            *://*) kind=URI ;;
            *:*) kind=IP ;;
            *[!0-9.]*) kind=DNS ;;
            *) kind=IP ;;
        esac
        names="$names,$kind:$host"
    done
    file=$(echo "$name" | tr /: __)
    # A strict check (RFC 5280; the default of Python 3.13's clients) requires the key identifiers.
    printf '%s\n' "subjectAltName=${names#,}" "basicConstraints=critical,CA:FALSE" "subjectKeyIdentifier=hash" \
        "authorityKeyIdentifier=keyid" >.names
    openssl req $new_key -keyout .new.key -out .new.csr -subj "/CN=$file"
    openssl x509 -req -in .new.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days "$DAYS" -extfile .names \
        -out .new.pem
    mv .new.key "$file.key"
    mv .new.pem "$file.pem"
done
rm -f .names .new.csr
chmod 644 ./*.pem
