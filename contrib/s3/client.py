"""A small S3 client for the checks: it needs Python alone, and takes the server from the AWS_* variables.

    client.py bucket BUCKET            make a bucket
    client.py keys BUCKET              length and key of every object
    client.py uploads BUCKET           number of parts and key of every unfinished upload
    client.py damage BUCKET KEY        change one bit in the middle of an object
    client.py cut BUCKET KEY           take the last byte off an object
"""
import datetime, hashlib, hmac, os, sys
import urllib.parse, urllib.request
import xml.etree.ElementTree as xml

SERVER = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL"])
REGION = os.environ["AWS_REGION"]
open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def ask(method, bucket, key="", query={}, body=b""):
    """Sends a request with a signature of version 4 in its headers."""
    path = urllib.parse.quote(f"/{bucket}/{key}" if key else f"/{bucket}", safe="/-_.~")
    query = "&".join(f"{urllib.parse.quote(n, safe='')}={urllib.parse.quote(v, safe='')}" for n, v in sorted(query.items()))
    now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": SERVER.netloc, "x-amz-content-sha256": digest, "x-amz-date": now}
    names = ";".join(headers)
    lines = [method, path, query, *(f"{n}:{v}" for n, v in headers.items()), "", names, digest]
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256("\n".join(lines).encode()).hexdigest()])
    secret = ("AWS4" + os.environ["AWS_SECRET_ACCESS_KEY"]).encode()
    for word in [*scope.split("/"), text]:
        secret = hmac.digest(secret, word.encode(), "sha256")
    who = f"Credential={os.environ['AWS_ACCESS_KEY_ID']}/{scope}"
    headers["authorization"] = f"AWS4-HMAC-SHA256 {who},SignedHeaders={names},Signature={secret.hex()}"
    # Without a type Python calls a body a form, which moto reads away.
    headers["content-type"] = "application/octet-stream"
    address = f"{SERVER.scheme}://{SERVER.netloc}{path}?{query}"
    request = urllib.request.Request(address, body or None, headers, method=method)
    return open_url(request, timeout=60).read()


def pages(bucket, key, query, carry):
    """Yields all pages of a list. `carry` names what a page says about the next one, by the name in the query."""
    while True:
        page = xml.fromstring(ask("GET", bucket, key, query))
        for element in page.iter():
            element.tag = element.tag.rpartition("}")[2]
        yield page
        if page.findtext("IsTruncated") != "true":
            return
        query = query | {name: page.findtext(element) for name, element in carry.items()}


def main(what, bucket, key=None):
    if what == "bucket":
        ask("PUT", bucket)
    elif what == "keys":
        for page in pages(bucket, "", {"list-type": "2"}, {"continuation-token": "NextContinuationToken"}):
            for found in page.iter("Contents"):
                print(found.findtext("Size"), found.findtext("Key"))
    elif what == "uploads":
        for page in pages(bucket, "", {"uploads": ""}, {"key-marker": "NextKeyMarker", "upload-id-marker": "NextUploadIdMarker"}):
            for found in page.iter("Upload"):
                key, query = found.findtext("Key"), {"uploadId": found.findtext("UploadId")}
                parts = pages(bucket, key, query, {"part-number-marker": "NextPartNumberMarker"})
                print(sum(len(list(page.iter("Part"))) for page in parts), key)
    elif what == "damage":
        body = bytearray(ask("GET", bucket, key))
        body[len(body) // 2] ^= 1
        ask("PUT", bucket, key, body=bytes(body))
    elif what == "cut":
        ask("PUT", bucket, key, body=ask("GET", bucket, key)[:-1])
    else:
        sys.exit(__doc__)


main(*sys.argv[1:])
