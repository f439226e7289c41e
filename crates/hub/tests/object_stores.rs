//! Uploads in parts to a server in this process that stops midway, and downloads that continue from a half.

mod common;

use anemoe_hub::{
    BundleManifest, ObjectStore, SendOptions, StoreLocation, bring_bundle, bundle_names, open_store,
    read_manifest, send_files, write_manifest,
};
use common::{Asked, Reply, TestServer, sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Bytes of a part.
const PART: usize = 16 << 20;

/// Objects, and unfinished uploads with their parts.
#[derive(Default)]
struct Kept {
    objects: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<String, (String, BTreeMap<u16, Vec<u8>>)>,
    /// Part numbers that the server refuses.
    refused: Vec<u16>,
    /// Part numbers that the server received.
    came: Vec<u16>,
    /// True if the next upload is assembled wrongly.
    forgets: bool,
    /// Part number at which the server ends the upload.
    ended_at: Option<u16>,
    /// Times that the server says, of parts to put together, that one is another.
    rewritten: usize,
    /// Times that the server completes an upload, and its answer is lost.
    silent: usize,
    /// Times that the server breaks off in an object.
    breaks_off: usize,
}

/// Returns a value of an address's query.
fn query<'a>(asked: &'a Asked, name: &str) -> Option<&'a str> {
    let query = asked.path.split_once('?')?.1;
    query.split('&').find_map(|pair| {
        let (found, value) = pair.split_once('=').unwrap_or((pair, ""));
        (found == name).then_some(value)
    })
}

fn answer(kept: &mut Kept, asked: &Asked) -> Reply {
    let path = asked.path.split('?').next().unwrap_or_default().to_string();
    let key = path.trim_start_matches("/models/").to_string();
    let id = query(asked, "uploadId").map(str::to_string);
    let number: Option<u16> = query(asked, "partNumber").map(|n| n.parse().unwrap());
    match (asked.method.as_str(), id, number) {
        ("POST", None, _) => {
            let id = format!("upload-{}", kept.uploads.len());
            kept.uploads.insert(id.clone(), (key, BTreeMap::new()));
            let xml = format!(
                "<InitiateMultipartUploadResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><UploadId>{id}</UploadId>\
                 </InitiateMultipartUploadResult>"
            );
            Reply::new(200, xml)
        }
        ("PUT", Some(_), Some(number)) if kept.refused.contains(&number) => {
            Reply::new(403, "<Error><Code>AccessDenied</Code></Error>")
        }
        ("PUT", Some(id), Some(_)) if kept.ended_at.is_some_and(|at| Some(at) == number) => {
            kept.ended_at = None;
            kept.uploads.remove(&id);
            Reply::new(404, "<Error><Code>NoSuchUpload</Code></Error>")
        }
        ("PUT", Some(id), Some(number)) => {
            let tag = sha256(&asked.body);
            kept.came.push(number);
            kept.uploads.get_mut(&id).unwrap().1.insert(number, asked.body.clone());
            Reply::new(200, "").with("etag", format!("\"{tag}\""))
        }
        ("POST", Some(_), None) if kept.rewritten > 0 => {
            kept.rewritten -= 1;
            Reply::new(400, "<Error><Code>InvalidPart</Code></Error>")
        }
        ("POST", Some(id), None) => {
            let Some((key, parts)) = kept.uploads.remove(&id) else {
                return Reply::new(404, "<Error><Code>NoSuchUpload</Code></Error>");
            };
            let tags: Vec<String> = parts.values().map(|p| sha256(p)).collect();
            let body = String::from_utf8(asked.body.clone()).unwrap();
            assert!(tags.iter().all(|tag| body.contains(tag.as_str())), "{body}");
            let mut all: Vec<u8> = parts.into_values().flatten().collect();
            if std::mem::take(&mut kept.forgets) {
                all.pop();
            }
            kept.objects.insert(key, all);
            if kept.silent > 0 {
                kept.silent -= 1;
                return Reply::new(503, "");
            }
            let xml = "<CompleteMultipartUploadResult><ETag>\"x-3\"</ETag></CompleteMultipartUploadResult>";
            Reply::new(200, xml)
        }
        ("GET", None, _) if query(asked, "list-type").is_some() => {
            let prefix = query(asked, "prefix").unwrap().replace("%2F", "/");
            let below = kept.objects.keys().filter_map(|key| key.strip_prefix(&prefix)?.split_once('/'));
            let names: std::collections::BTreeSet<&str> = below.map(|(name, _)| name).collect();
            let prefixes: String = names
                .iter()
                .map(|name| format!("<CommonPrefixes><Prefix>{prefix}{name}/</Prefix></CommonPrefixes>"))
                .collect();
            let xml = format!(
                "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Prefix>{prefix}</Prefix>\
                 <KeyCount>{}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{prefixes}</ListBucketResult>",
                names.len()
            );
            Reply::new(200, xml)
        }
        ("PUT", None, _) => {
            kept.objects.insert(key, asked.body.clone());
            Reply::new(200, "").with("etag", "\"x\"")
        }
        _ => match kept.objects.get(&key) {
            Some(bytes) if asked.method == "GET" && kept.breaks_off > 0 => {
                kept.breaks_off -= 1;
                Reply { cut: Some(bytes.len() / 2), ..Reply::part(asked, bytes) }
            }
            Some(bytes) => Reply::part(asked, bytes),
            None => Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
        },
    }
}

struct Machine {
    server: TestServer,
    kept: Arc<Mutex<Kept>>,
    dir: tempfile::TempDir,
}

impl Machine {
    fn new(twist: impl Fn(&Asked, Reply) -> Reply + Send + 'static) -> Machine {
        let kept: Arc<Mutex<Kept>> = Arc::default();
        let served = Arc::clone(&kept);
        let server = TestServer::start(move |asked| twist(asked, answer(&mut served.lock().unwrap(), asked)));
        Machine { server, kept, dir: tempfile::tempdir().unwrap() }
    }

    fn store(&self) -> Box<dyn ObjectStore> {
        let location = StoreLocation::parse(Path::new("s3://models/p")).unwrap();
        let variable = |name: &str| match name {
            "AWS_ENDPOINT_URL" => Some(self.server.address.clone().into()),
            "AWS_ALLOW_HTTP" => Some("1".into()),
            "AWS_ACCESS_KEY_ID" | "AWS_SECRET_ACCESS_KEY" => Some("x".into()),
            _ => None,
        };
        open_store(&location, variable).unwrap()
    }

    /// Makes a folder with a file of two and a half parts. Returns the folder and the file's bytes.
    fn bundle(&self) -> (PathBuf, Vec<u8>) {
        let bytes: Vec<u8> = (0..(5 * PART / 2) as u32 / 4).flat_map(u32::to_le_bytes).collect();
        let folder = self.dir.path().join("bundle");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("weights"), &bytes).unwrap();
        (folder, bytes)
    }
}

const OPTIONS: SendOptions = SendOptions { jobs: 2, verify: false };

#[test]
fn an_upload_goes_on_with_the_parts_that_are_there() {
    let machine = Machine::new(|_, reply| reply);
    let (folder, bytes) = machine.bundle();
    let files = ["weights".to_string()];
    machine.kept.lock().unwrap().refused = vec![2];
    let store = machine.store();
    let refused = send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ()).unwrap_err().to_string();
    assert!(refused.contains("does not let this AWS_ACCESS_KEY_ID"), "{refused}");
    assert!(machine.kept.lock().unwrap().objects.is_empty());
    machine.kept.lock().unwrap().refused.clear();
    let highest = Mutex::new((0, 0));
    let tell = |p: anemoe_hub::TransferProgress| *highest.lock().unwrap() = (p.done, p.total);
    let (entries, report) = send_files(store.as_ref(), &folder, &files, &OPTIONS, &tell).unwrap();
    assert_eq!(machine.kept.lock().unwrap().came, [1, 2, 3]);
    assert_eq!((report.bytes_sent, report.bytes_there), ((bytes.len() - PART) as u64, PART as u64));
    assert_eq!(*highest.lock().unwrap(), (bytes.len() as u64, bytes.len() as u64));
    assert_eq!(entries[0].sha256, sha256(&bytes));
    let key = format!("p/{}", entries[0].contents().key());
    assert!(machine.kept.lock().unwrap().objects[&key] == bytes);
    for asked in machine.server.asked().iter().filter(|a| a.path.contains("partNumber")) {
        assert!(asked.header("x-amz-checksum-sha256").is_some());
    }
    assert!(!machine.dir.path().join(".bundle.anemoe-push").exists());
    // The object exists now.
    let (_, report) = send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ()).unwrap();
    assert_eq!((report.files_sent, report.bytes_there), (0, bytes.len() as u64));
}

#[test]
fn an_upload_that_the_server_ends_is_no_failure() {
    let machine = Machine::new(|_, reply| reply);
    let (folder, bytes) = machine.bundle();
    let files = ["weights".to_string()];
    let store = machine.store();
    let progress = Mutex::new((0, 0));
    let tell = |p: anemoe_hub::TransferProgress| *progress.lock().unwrap() = (p.done, p.total);
    let send = || send_files(store.as_ref(), &folder, &files, &OPTIONS, &tell).unwrap().1;
    let whole = bytes.len() as u64;
    let key = format!("p/objects/{}/{}", &sha256(&bytes)[..2], sha256(&bytes));
    type Change = fn(&mut Kept);
    let cases: [(Change, u64); 3] = [
        (|kept| kept.ended_at = Some(2), PART as u64 + whole),
        (|kept| kept.rewritten = 1, 2 * whole),
        (|kept| kept.silent = 1, whole),
    ];
    for (change, sent) in cases {
        machine.kept.lock().unwrap().objects.clear();
        change(&mut machine.kept.lock().unwrap());
        assert_eq!(send().bytes_sent, sent);
        assert_eq!(*progress.lock().unwrap(), (whole, whole));
        assert!(machine.kept.lock().unwrap().objects[&key] == bytes);
    }
    // A server that refuses the parts of a second upload says why; the next push begins anew.
    machine.kept.lock().unwrap().objects.clear();
    machine.kept.lock().unwrap().rewritten = 2;
    let refused = send_files(store.as_ref(), &folder, &files, &OPTIONS, &tell).unwrap_err().to_string();
    assert!(refused.contains("InvalidPart"), "{refused}");
    machine.kept.lock().unwrap().rewritten = 1;
    assert_eq!(send().bytes_sent, whole);
    assert!(machine.kept.lock().unwrap().objects[&key] == bytes);
}

#[test]
fn parts_of_a_file_that_changed_meanwhile_are_sent_again() {
    let machine = Machine::new(|_, reply| reply);
    let (folder, bytes) = machine.bundle();
    let files = ["weights".to_string()];
    let store = machine.store();
    let send = || send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ());
    machine.kept.lock().unwrap().refused = vec![3];
    send().unwrap_err();
    // The same upload as if the file had been another one when its second part went.
    let record = std::fs::read_dir(machine.dir.path().join(".bundle.anemoe-push")).unwrap().next().unwrap();
    let record = record.unwrap().path();
    let other =
        std::fs::read_to_string(&record).unwrap().replace(&sha256(&bytes[PART..2 * PART]), &sha256(b""));
    std::fs::write(&record, other).unwrap();
    machine.kept.lock().unwrap().refused.clear();
    assert_eq!(send().unwrap().1.bytes_sent, (bytes.len() - PART) as u64);
    assert_eq!(machine.kept.lock().unwrap().came, [1, 2, 2, 3]);
    // A file that changes while it is sent is no object.
    machine.kept.lock().unwrap().objects.clear();
    let path = folder.join("weights");
    let change = |p: anemoe_hub::TransferProgress| {
        if p.done > 0 {
            std::fs::write(&path, &bytes[1..]).unwrap();
        }
    };
    let changed = send_files(store.as_ref(), &folder, &files, &OPTIONS, &change).unwrap_err().to_string();
    assert!(changed.contains("it changed while it was sent"), "{changed}");
    assert!(machine.kept.lock().unwrap().objects.is_empty());
}

#[test]
fn a_part_without_a_tag_is_an_error_that_says_so() {
    let machine = Machine::new(|asked, reply| match query(asked, "partNumber") {
        Some(_) => reply.without_headers(),
        None => reply,
    });
    let (folder, _) = machine.bundle();
    let files = ["weights".to_string()];
    let refused = send_files(machine.store().as_ref(), &folder, &files, &OPTIONS, &|_| ()).unwrap_err();
    assert!(refused.to_string().contains("ETag Header missing"), "{refused}");
}

/// Makes the server's answers those of Azure: blobs in the place of objects, blocks in that of parts.
fn azure_answer(kept: &mut Kept, asked: &Asked) -> Reply {
    let path = asked.path.split('?').next().unwrap_or_default().to_string();
    let key = path.trim_start_matches("/models/").to_string();
    let blocks = &mut kept.uploads.entry(key.clone()).or_default().1;
    match (asked.method.as_str(), query(asked, "comp")) {
        ("PUT", Some("block")) => {
            let number = blocks.len() as u16 + 1;
            kept.came.push(number);
            match kept.refused.contains(&number) {
                true => return Reply::new(403, "<Error><Code>AuthorizationFailure</Code></Error>"),
                false => blocks.insert(number, asked.body.clone()),
            };
            Reply::new(201, "")
        }
        ("PUT", Some("blocklist")) => {
            let all = std::mem::take(blocks).into_values().flatten().collect();
            kept.objects.insert(key, all);
            Reply::new(201, "").with("etag", "\"x\"")
        }
        ("GET", Some("list")) => {
            let prefix = query(asked, "prefix").unwrap().replace("%2F", "/");
            let name = "b";
            let found = kept.objects.keys().any(|key| key.starts_with(&format!("{prefix}{name}/")));
            let prefixes = if found {
                format!("<BlobPrefix><Name>{prefix}{name}/</Name></BlobPrefix>")
            } else {
                String::new()
            };
            let xml = format!(
                "<EnumerationResults><Prefix>{prefix}</Prefix><Blobs>{prefixes}</Blobs><NextMarker/></EnumerationResults>"
            );
            Reply::new(200, xml)
        }
        _ => answer(kept, asked),
    }
}

#[test]
fn google_and_azure_hold_bundles_too() {
    type Answer = fn(&mut Kept, &Asked) -> Reply;
    type Variables = &'static [(&'static str, &'static str)];
    let google: Answer = |kept, asked| {
        let path = asked.path.replace("%2F", "/").replace("%2E", ".").replace("%2D", "-");
        answer(kept, &Asked { path, ..asked.clone() })
    };
    let kinds: [(&str, Answer, Variables); 2] = [
        ("gs://models/p", google, &[("GOOGLE_BEARER_TOKEN", "a2V5"), ("GOOGLE_ALLOW_HTTP", "true")]),
        (
            "az://models/p",
            azure_answer,
            &[
                ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
                ("AZURE_STORAGE_ACCOUNT_KEY", "a2V5"),
                ("AZURE_ALLOW_HTTP", "true"),
            ],
        ),
    ];
    for (location, answer, variables) in kinds {
        let kept: Arc<Mutex<Kept>> = Arc::default();
        let served = Arc::clone(&kept);
        let server = TestServer::start(move |asked| {
            let reply = answer(&mut served.lock().unwrap(), asked);
            let reply = reply.with("last-modified", "Wed, 21 Oct 2026 07:28:00 GMT");
            if reply.headers.iter().any(|(name, _)| name == "etag") {
                reply
            } else {
                reply.with("etag", "\"x\"")
            }
        });
        let open = |allows_http: bool| {
            let variable = |name: &str| match name {
                "GOOGLE_BASE_URL" | "AZURE_STORAGE_ENDPOINT" => Some(server.address.clone().into()),
                _ if name.ends_with("ALLOW_HTTP") && !allows_http => None,
                _ => variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.into()),
            };
            open_store(&StoreLocation::parse(Path::new(location)).unwrap(), variable).unwrap()
        };
        let refused = open(false).prepare().unwrap_err().to_string();
        assert!(refused.contains("plain http"), "{location}: {refused}");
        let store = open(true);
        store.prepare().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let (folder, target) = (dir.path().join("b"), dir.path().join("target"));
        std::fs::create_dir(&folder).unwrap();
        let files = ["large", "small"].map(str::to_string);
        std::fs::write(folder.join("large"), vec![7; 2 * PART + 1]).unwrap();
        std::fs::write(folder.join("small"), "small").unwrap();
        kept.lock().unwrap().refused = vec![2];
        let send = || send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ());
        let refused = send().unwrap_err().to_string();
        assert!(refused.starts_with(location) && refused.contains("status 403"), "{refused}");
        assert!(!refused.contains("a2V5"), "{refused}");
        kept.lock().unwrap().refused.clear();
        let (entries, report) = send().unwrap();
        assert_eq!(report.bytes_sent, (PART + 1) as u64, "{location}");
        write_manifest(store.as_ref(), "b", None, entries).unwrap();
        assert_eq!(bundle_names(store.as_ref()).unwrap(), ["b"]);
        let manifest = read_manifest(store.as_ref(), &BundleManifest::key("b", None)).unwrap().unwrap();
        kept.lock().unwrap().breaks_off = 1;
        bring_bundle(store.as_ref(), &manifest, &target, &[], 1, &|_| Ok(()), &|_| ()).unwrap();
        for file in &files {
            assert!(std::fs::read(target.join(file)).unwrap() == std::fs::read(folder.join(file)).unwrap());
        }
        assert!(!dir.path().join(".b.anemoe-push").exists());
        for asked in server.asked() {
            let signed = asked.header("authorization").unwrap();
            let is_signed = match location.starts_with("gs") {
                true => signed == "Bearer a2V5",
                false => signed.starts_with("SharedKey account:") && asked.header("date").is_some(),
            };
            assert!(is_signed && asked.path.starts_with("/models"), "{asked:?}");
        }
    }
}

#[test]
fn an_object_that_the_server_cannot_read_to_its_end_is_sent_again() {
    let machine = Machine::new(|_, reply| reply);
    let (folder, bytes) = machine.bundle();
    std::fs::write(folder.join("weights"), &bytes[..1000]).unwrap();
    let files = ["weights".to_string()];
    let send = |verify| {
        let options = SendOptions { verify, ..OPTIONS };
        send_files(machine.store().as_ref(), &folder, &files, &options, &|_| ()).unwrap().1.files_sent
    };
    assert_eq!(send(false), 1);
    machine.kept.lock().unwrap().breaks_off = 2;
    assert_eq!(send(true), 0);
    machine.kept.lock().unwrap().breaks_off = usize::MAX;
    assert_eq!(send(true), 1);
}

#[test]
fn a_server_that_loses_bytes_is_found_out() {
    let machine = Machine::new(|_, reply| reply);
    let (folder, _) = machine.bundle();
    machine.kept.lock().unwrap().forgets = true;
    let files = ["weights".to_string()];
    let send = || send_files(machine.store().as_ref(), &folder, &files, &OPTIONS, &|_| ());
    let lost = send().unwrap_err().to_string();
    assert!(lost.contains("bytes together where"), "{lost}");
    assert_eq!(send().unwrap().1.files_sent, 1);
}

#[test]
fn a_download_that_was_given_up_goes_on_in_the_middle_of_the_file() {
    let count = std::sync::atomic::AtomicUsize::new(0);
    // The first answer breaks off; answers two to seven send nothing.
    let machine = Machine::new(move |asked, reply| {
        if asked.method != "GET" || !asked.path.contains("/objects/") {
            return reply;
        }
        match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            0 => Reply { cut: Some(PART), ..reply },
            1..=6 => Reply::new(503, ""),
            _ => reply,
        }
    });
    let (folder, bytes) = machine.bundle();
    let store = machine.store();
    let (entries, _) =
        send_files(store.as_ref(), &folder, &["weights".to_string()], &OPTIONS, &|_| ()).unwrap();
    write_manifest(store.as_ref(), "b", None, entries).unwrap();
    let key = BundleManifest::key("b", None);
    let manifest = read_manifest(store.as_ref(), &key).unwrap().unwrap();
    let target = folder.join("target");
    let bring = || bring_bundle(store.as_ref(), &manifest, &target, &[], 2, &|_| Ok(()), &|_| ());
    let given_up = bring().unwrap_err().to_string();
    assert!(given_up.contains("goes on from there") && !target.exists(), "{given_up}");
    let report = bring().unwrap();
    assert_eq!(report.bytes_fetched, (bytes.len() - PART) as u64);
    assert!(std::fs::read(target.join("weights")).unwrap() == bytes);
    assert!(!folder.join(".target.anemoe-pull").exists());
    let refused = write_manifest(store.as_ref(), "../b", None, Vec::new()).unwrap_err().to_string();
    assert!(refused.contains("no name for a bundle"), "{refused}");
}

/// Change of a server to its own reply, given how many requests of the same kind came before.
type Quirk = fn(&Asked, Reply, usize) -> Reply;

/// Rewrites a reply's XML.
fn xml(reply: Reply, change: impl Fn(String) -> String) -> Reply {
    match String::from_utf8(reply.body.clone()) {
        Ok(text) if text.starts_with('<') => Reply { body: change(text).into(), ..reply },
        _ => reply,
    }
}

/// Rewrites the texts between the tags of XML.
fn texts(xml: &str, change: impl Fn(&str) -> String) -> String {
    let one = |piece: &str| match piece.split_once('>') {
        Some((tag, text)) if !text.is_empty() => format!("{tag}>{}", change(text)),
        _ => piece.to_string(),
    };
    xml.split('<').map(one).collect::<Vec<_>>().join("<")
}

/// Makes a refusal in the place of the first reply of each kind.
fn first(reply: Reply, before: usize, status: u16, code: &str) -> Reply {
    let error = format!("<?xml version=\"1.0\"?>\n<Error><Code>{code}</Code></Error>");
    if before == 0 { Reply::new(status, error).with("retry-after", "0") } else { reply }
}

fn is_list(asked: &Asked) -> bool {
    query(asked, "list-type").is_some()
}

/// Makes a page of a list that says that another one follows.
fn page(names: &str, token: &str) -> Reply {
    let xml = format!(
        "<ListBucketResult><IsTruncated>true</IsTruncated>{names}\
         <NextContinuationToken>{token}</NextContinuationToken></ListBucketResult>"
    );
    Reply::new(200, xml)
}

/// Quirks of servers, and what an error says where one is right.
const QUIRKS: [(&str, Quirk, Option<&str>); 30] = [
    (
        "no namespace",
        |_, r, _| xml(r, |x| x.replace(" xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"", "")),
        None,
    ),
    ("another namespace", |_, r, _| xml(r, |x| x.replace("s3.amazonaws.com", "s3.example")), None),
    (
        "a prefix",
        |_, r, _| {
            xml(r, |x| {
                let named = x.replace(" xmlns=", " xmlns:s=").replace('<', "<s:").replace("<s:/", "</s:");
                if named.contains("xmlns:s=") { named } else { named.replacen('>', " xmlns:s=\"x\">", 1) }
            })
        },
        None,
    ),
    (
        "white space, and a declaration behind it",
        |_, r, _| xml(r, |x| format!(" \n\n<?xml version=\"1.0\"?>\n{}", x.replace("><", ">\n  <"))),
        None,
    ),
    ("CDATA", |_, r, _| xml(r, |x| texts(&x, |t| format!("<![CDATA[{t}]]>"))), None),
    ("entities", |_, r, _| xml(r, |x| texts(&x, |t| t.replace('a', "&#97;").replace('-', "&#x2d;"))), None),
    ("no count of keys", |_, r, _| xml(r, |x| x.replace("<KeyCount>1</KeyCount>", "")), None),
    (
        "tags without quotes",
        |_, mut r, _| {
            r.headers.iter_mut().filter(|(n, _)| n == "etag").for_each(|(_, v)| *v = v.replace('"', ""));
            xml(r, |x| x.replace("<ETag>\"", "<ETag>").replace("\"</ETag>", "</ETag>"))
        },
        None,
    ),
    ("an error in a success", |_, r, n| first(r, n, 200, "InternalError"), None),
    ("too many requests", |_, r, n| first(r, n, 503, "SlowDown"), None),
    ("a slow upload", |a, r, n| if a.body.is_empty() { r } else { first(r, n, 400, "RequestTimeout") }, None),
    (
        "a body that broke off",
        |a, r, n| if a.method == "PUT" { first(r, n, 400, "IncompleteBody") } else { r },
        None,
    ),
    (
        "a body that changed",
        |a, r, n| if a.method == "PUT" { first(r, n, 400, "BadDigest") } else { r },
        None,
    ),
    ("a server that starts", |_, r, n| first(r, n, 200, "XMinioServerNotInitialized"), None),
    ("another request at work", |_, r, n| first(r, n, 409, "OperationAborted"), None),
    ("a gateway's page", |_, r, n| if n == 0 { Reply::new(502, "<html><body>Bad") } else { r }, None),
    (
        "a connection that breaks",
        |a, r, n| match n == 0 && a.method != "HEAD" {
            true => Reply { cut: Some(r.body.len() / 2), length: Some(r.body.len() + 9), ..r },
            false => r,
        },
        None,
    ),
    (
        "a byte that changes on the way",
        |a, mut r, n| {
            if a.method == "GET" && !is_list(a) && r.status < 300 && n < 4 && n != 2 {
                r.body.first_mut().into_iter().for_each(|byte| *byte ^= 1);
            }
            r
        },
        None,
    ),
    (
        "an empty success",
        |a, r, n| {
            if a.method == "GET" && !is_list(a) && r.status < 300 && n % 2 == 1 {
                Reply::new(200, "")
            } else {
                r
            }
        },
        None,
    ),
    (
        "an error in a success that no try changes",
        |a, r, _| if a.method == "PUT" { first(r, 0, 200, "AccessDenied") } else { r },
        Some("AccessDenied"),
    ),
    (
        "one page forever",
        |a, r, _| if is_list(a) { page("", "t") } else { r },
        Some("list does not end, after 0 names"),
    ),
    (
        "empty pages forever",
        |a, r, n| if is_list(a) { page("", &n.to_string()) } else { r },
        Some("list does not end"),
    ),
    (
        "other keys forever",
        |a, r, n| match is_list(a) {
            true => page(
                &format!(
                    "<Contents><Key>other/x</Key>{}</Contents>",
                    "<Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
                ),
                &n.to_string(),
            ),
            false => r,
        },
        Some("list does not end"),
    ),
    (
        "new names forever",
        |a, r, n| match is_list(a) {
            true => {
                let one = |i| format!("<CommonPrefixes><Prefix>p/bundles/{n}-{i}/</Prefix></CommonPrefixes>");
                page(&(0..10_000).map(one).collect::<String>(), &n.to_string())
            }
            false => r,
        },
        Some("list does not end, after 1"),
    ),
    (
        "another region",
        |_, _, _| {
            Reply::new(
                400,
                "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-1</Region></Error>",
            )
        },
        Some("set AWS_REGION=eu-west-1"),
    ),
    (
        "a redirect to another region",
        |_, _, _| {
            Reply::new(301, "").with("x-amz-bucket-region", "eu-west-2").with("location", "http://127.0.0.2/")
        },
        Some("set AWS_REGION=eu-west-2"),
    ),
    (
        "another region without an address",
        |_, _, _| {
            let error = "<Error><Code>PermanentRedirect</Code></Error>";
            Reply::new(301, error).with("x-amz-bucket-region", "eu-west-3")
        },
        Some("set AWS_REGION=eu-west-3"),
    ),
    (
        "another region in the error alone",
        |_, _, _| Reply::new(301, "<Error><Code>PermanentRedirect</Code><Region>eu-west-4</Region></Error>"),
        Some("set AWS_REGION=eu-west-4"),
    ),
    (
        "another time",
        |_, _, _| Reply::new(403, "").with("date", "Wed, 21 Oct 2015 07:28:00 GMT"),
        Some("clock of this machine"),
    ),
    ("an address that is missing", |_, _, _| Reply::new(301, ""), Some("redirects to another server")),
];

#[test]
fn quirks_of_servers_are_known() {
    let round = |quirk: Quirk, parts: bool| -> anemoe_hub::Result<()> {
        let before: Mutex<BTreeMap<_, usize>> = Mutex::default();
        let machine = Machine::new(move |asked, reply| {
            let names = ["uploadId", "partNumber", "uploads", "list-type"];
            let kind = (asked.method.clone(), names.map(|name| query(asked, name).is_some()));
            let mut before = before.lock().unwrap();
            let count = before.entry(kind).or_default();
            *count += 1;
            quirk(asked, reply, *count - 1)
        });
        let folder = machine.dir.path().join("a.b");
        std::fs::create_dir(&folder).unwrap();
        let files = ["large", "small"].map(str::to_string);
        std::fs::write(folder.join("large"), vec![7; if parts { PART + 1 } else { 1 }]).unwrap();
        std::fs::write(folder.join("small"), "small").unwrap();
        let store = machine.store();
        store.prepare()?;
        let (entries, _) = send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ())?;
        write_manifest(store.as_ref(), "a.b", None, entries)?;
        assert_eq!(bundle_names(store.as_ref())?, ["a.b"]);
        let manifest = read_manifest(store.as_ref(), &BundleManifest::key("a.b", None))?.unwrap();
        let target = machine.dir.path().join("target");
        bring_bundle(store.as_ref(), &manifest, &target, &[], 1, &|_| Ok(()), &|_| ())?;
        for file in &files {
            assert!(std::fs::read(target.join(file)).unwrap() == std::fs::read(folder.join(file)).unwrap());
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let rounds: Vec<_> =
            QUIRKS.iter().map(|(_, quirk, says)| scope.spawn(|| round(*quirk, says.is_none()))).collect();
        for ((name, _, says), ended) in QUIRKS.iter().zip(rounds) {
            match (ended.join().unwrap_or_else(|_| panic!("{name}")), says) {
                (Ok(()), None) => {}
                (Err(e), Some(says)) if e.to_string().contains(says) => {}
                (ended, says) => panic!("{name}: {ended:?}, expected {says:?}"),
            }
        }
    });
}

#[cfg(unix)]
#[test]
fn pipes_in_the_place_of_contents_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, store) = (dir.path().join("a"), dir.path().join("store"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("f"), "contents").unwrap();
    let store = open_store(&StoreLocation::parse(&store).unwrap(), |_| None).unwrap();
    let files = ["f".to_string()];
    let (entries, _) = send_files(store.as_ref(), &folder, &files, &OPTIONS, &|_| ()).unwrap();
    let partial = dir.path().join(".t.anemoe-pull/partial");
    std::fs::create_dir_all(&partial).unwrap();
    let pipe = partial.join(&entries[0].sha256);
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let manifest = BundleManifest::new(None, entries);
    let bring =
        || bring_bundle(store.as_ref(), &manifest, &dir.path().join("t"), &[], 1, &|_| Ok(()), &|_| ());
    let refused = bring().unwrap_err().to_string();
    assert!(refused.contains("a pipe, where a regular file is expected"), "{refused}");
    // The same for a download.
    let machine = Machine::new(|_, reply| reply);
    send_files(machine.store().as_ref(), &folder, &files, &OPTIONS, &|_| ()).unwrap();
    let bring = bring_bundle(
        machine.store().as_ref(),
        &manifest,
        &dir.path().join("t"),
        &[],
        1,
        &|_| Ok(()),
        &|_| (),
    );
    let refused = bring.unwrap_err().to_string();
    assert!(refused.contains("a pipe, where a regular file is expected"), "{refused}");
}
