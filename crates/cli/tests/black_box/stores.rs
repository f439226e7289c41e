//! Bundles and parts of builds in a store: a folder, or a server in this process that drops, lies and refuses.

use crate::common::{anemoe, contents, copy, finish, fixture, json, refused, run};
use crate::hub_server::{Asked, Reply, TestServer};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const OPTIONS: [&str; 2] = ["--tokens", "1"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Builds a finished bundle of a fixture.
fn built(dir: &Path, name: &str) -> PathBuf {
    let bundle = dir.join(name);
    crate::common::build(&fixture("tiny-zaya"), &bundle, &OPTIONS);
    bundle
}

fn objects(store: &Path) -> Vec<PathBuf> {
    contents(&store.join("objects")).into_iter().map(|(path, _)| store.join("objects").join(path)).collect()
}

#[test]
fn a_bundle_goes_through_a_folder_and_what_is_there_is_not_sent_again() {
    let dir = tempfile::tempdir().unwrap();
    let (bundle, store) = (built(dir.path(), "a.anemoe"), dir.path().join("store"));
    let first = json(0, &["push", text(&bundle), text(&store)]);
    assert_eq!(
        first["bytes"],
        first["bytes_sent"].as_u64().unwrap() + first["bytes_there"].as_u64().unwrap()
    );
    assert!(first["files_sent"].as_u64().unwrap() > 17 && first["name"] == "a.anemoe", "{first}");
    let again = json(0, &["push", text(&bundle), text(&store)]);
    assert_eq!((&again["files_sent"], &again["bytes_sent"]), (&Value::from(0), &Value::from(0)));
    // Another bundle with the same files, except for its tokenizer.
    let other = dir.path().join("b.anemoe");
    copy(&bundle, &other);
    std::fs::write(other.join("tokenizer.json"), "{}").unwrap();
    let other = json(0, &["push", text(&other), &format!("file://{}", text(&store)), "--jobs", "1"]);
    assert_eq!(other["files_sent"], 1, "{other}");
    let pulled = dir.path().join("pulled.anemoe");
    let report = json(0, &["pull", text(&store), text(&pulled), "--name", "a.anemoe"]);
    assert_eq!(report["bytes"], first["bytes"]);
    assert!(contents(&pulled) == contents(&bundle));
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(left.iter().all(|n| !n.to_string_lossy().starts_with('.')), "{left:?}");
    // All of it moves on one thread, where no other may start (which root always may).
    #[cfg(target_os = "linux")]
    for (command, to) in [("push", "alone"), ("pull", "alone.anemoe")] {
        let to = dir.path().join(to);
        let from = if command == "push" { &bundle } else { &store };
        let line = format!("ulimit -u 1; exec \"$0\" {command} \"$@\" --jobs 4");
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", &line, env!("CARGO_BIN_EXE_anemoe"), text(from), text(&to), "--name", "a.anemoe"]);
        let (code, _, err) = finish(shell.output().unwrap());
        assert_eq!(code, 0, "{command}: {err}");
    }
    // The same pull again finds all files in place, also when the bundle's journal has grown.
    json(0, &["check", text(&pulled)]);
    let report = json(0, &["pull", text(&store), text(&pulled), "--name", "a.anemoe"]);
    assert_eq!(report["bytes_fetched"], 0, "{report}");
    refused(
        &["pull", text(&store), text(&pulled), "--name", "b.anemoe"],
        &["is not the bundle of the store"],
    );
    refused(&["pull", text(&store), text(&dir.path().join("c"))], &["no bundle `c`", "a.anemoe, b.anemoe"]);
    refused(&["pull", text(&dir.path().join("nothing")), text(&dir.path().join("c"))], &["no bundle `c`"]);
    assert!(!dir.path().join("nothing").exists() && !dir.path().join("c").exists());
}

#[test]
fn damage_in_a_store_is_found_and_mended() {
    let dir = tempfile::tempdir().unwrap();
    let (bundle, store) = (built(dir.path(), "a.anemoe"), dir.path().join("store"));
    json(0, &["push", text(&bundle), text(&store)]);
    let largest = objects(&store).into_iter().max_by_key(|p| p.metadata().unwrap().len()).unwrap();
    let right = std::fs::read(&largest).unwrap();
    let mut wrong = right.clone();
    wrong[7] ^= 1;
    std::fs::write(&largest, &wrong).unwrap();
    let target = dir.path().join("pulled.anemoe");
    let pull = ["pull", text(&store), text(&target), "--name", "a.anemoe"];
    refused(&pull, &[text(&largest), "its hash is", "--verify"]);
    assert!(!target.exists());
    assert_eq!(json(0, &["push", text(&bundle), text(&store)])["files_sent"], 0);
    assert_eq!(json(0, &["push", text(&bundle), text(&store), "--verify"])["files_sent"], 1);
    // Files that have arrived stay, and only the rest is fetched.
    let rest = json(0, &pull);
    assert_eq!(
        (&rest["files_fetched"], &rest["bytes_fetched"]),
        (&Value::from(1), &Value::from(right.len()))
    );
    assert!(contents(&target) == contents(&bundle));
    // A short object is found without being read, and so is a missing one.
    std::fs::remove_dir_all(&target).unwrap();
    std::fs::write(&largest, &right[1..]).unwrap();
    refused(&pull, &["bytes where the manifest says"]);
    std::fs::remove_file(&largest).unwrap();
    refused(&pull, &["it is not there"]);
    assert_eq!(json(0, &["push", text(&bundle), text(&store)])["files_sent"], 1);
    json(0, &pull);
    // A damaged bundle is not sent.
    let weights = bundle.join("embed.bin");
    let mut bytes = std::fs::read(&weights).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    refused(&["push", text(&bundle), text(&store)], &["embed.bin", "SHA-256"]);
}

#[test]
fn hostile_manifests_write_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (bundle, store) = (built(dir.path(), "a.anemoe"), dir.path().join("store"));
    json(0, &["push", text(&bundle), text(&store)]);
    let path = store.join("bundles/a.anemoe/bundle.json");
    let written: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    // As older versions wrote it: what follows would be refused by the hash of the list alone.
    let mut right = written.clone();
    right.as_object_mut().unwrap().remove("files_sha256");
    std::fs::write(&path, right.to_string()).unwrap();
    let target = dir.path().join("in/pulled.anemoe");
    std::fs::create_dir(dir.path().join("in")).unwrap();
    let before = contents(dir.path());
    let hostile = |change: &dyn Fn(&mut Value), says: &str| {
        let mut manifest = right.clone();
        change(&mut manifest);
        std::fs::write(&path, manifest.to_string()).unwrap();
        refused(&["pull", text(&store), text(&target), "--name", "a.anemoe"], &[says]);
        std::fs::write(&path, &before.iter().find(|(p, _)| dir.path().join(p) == path).unwrap().1).unwrap();
        assert!(contents(dir.path()) == before, "{says}");
    };
    for name in ["../../evil", "/tmp/evil", ".ssh/evil", "a\\..\\evil"] {
        hostile(&|m| m["files"][0]["path"] = name.into(), "is not a path in a bundle");
    }
    hostile(&|m| m["files"][1]["path"] = m["files"][0]["path"].clone(), "is there twice");
    hostile(&|m| m["files"][0]["bytes"] = (1u64 << 60).into(), "and its disk has");
    hostile(&|m| m["files"][0]["sha256"] = "x".into(), "is not a SHA-256");
    hostile(&|m| m["files"].as_array_mut().unwrap().clear(), "no chain.json");
    hostile(&|m| *m = 7.into(), "expected an object");
    // The contract names a file that the manifest lacks: all other files are fetched, and deleted again.
    let lacking = |part: &str, says: &str| {
        let keep = |f: &Value| !f["path"].as_str().unwrap().contains(part);
        hostile(&|m| m["files"].as_array_mut().unwrap().retain(keep), says);
    };
    lacking("embed.bin", "lacks embed.bin");
    for part in
        ["L00.attn.mlpackage/Manifest", "L00.attn.mlpackage", "L00.attn.mlpackage/Data", "model.mlmodel"]
    {
        lacking(part, "L00.attn.mlpackage");
    }
    lacking("weight.bin", ".mlpackage: size: ");
    // The contract does not name this file; the hash of the list does not allow that it is left out.
    let is_other = |f: &Value| f["path"] != "generation_config.json";
    hostile(
        &|m| {
            *m = written.clone();
            m["files"].as_array_mut().unwrap().retain(is_other);
        },
        "`files_sha256`",
    );
    // Nor does a folder that lacks the same file count as the bundle of the store.
    let mut manifest = right.clone();
    manifest["files"]
        .as_array_mut()
        .unwrap()
        .retain(|f| !f["path"].as_str().unwrap().ends_with("weight.bin"));
    std::fs::write(&path, manifest.to_string()).unwrap();
    copy(&bundle, &target);
    for (file, _) in contents(&target).iter().filter(|(file, _)| file.ends_with("weight.bin")) {
        std::fs::remove_file(target.join(file)).unwrap();
    }
    refused(&["pull", text(&store), text(&target), "--name", "a.anemoe"], &["no whole bundle"]);
}

#[cfg(unix)]
#[test]
fn links_are_not_followed() {
    let dir = tempfile::tempdir().unwrap();
    let (bundle, store) = (built(dir.path(), "a.anemoe"), dir.path().join("store"));
    json(0, &["push", text(&bundle), text(&store)]);
    let other = dir.path().join("other");
    std::fs::create_dir(&other).unwrap();
    let target = dir.path().join("p.anemoe");
    let pull = ["pull", text(&store), text(&target), "--name", "a.anemoe"];
    let staged = dir.path().join(".p.anemoe.anemoe-pull");
    std::os::unix::fs::symlink(&other, &staged).unwrap();
    refused(&pull, &["a link"]);
    std::fs::remove_file(&staged).unwrap();
    std::fs::create_dir_all(staged.join("files")).unwrap();
    std::os::unix::fs::symlink(&other, staged.join("files/shards")).unwrap();
    refused(&pull, &["a link"]);
    assert!(std::fs::read_dir(&other).unwrap().next().is_none());
    std::fs::remove_dir_all(&staged).unwrap();
    // A link in the bundle that leads out of it is not sent.
    let vocabulary = dir.path().join("vocabulary");
    std::fs::write(&vocabulary, "secret").unwrap();
    std::os::unix::fs::symlink(&vocabulary, bundle.join("tokenizer.json")).unwrap();
    refused(&["push", text(&bundle), text(&store)], &["tokenizer.json", "a link"]);
}

fn part<'a>(model: &'a Path, folder: &'a Path, store: &'a Path, share: &'a str) -> Vec<&'a str> {
    let mut args = vec!["build", text(model), "-o", text(folder), "--shard", share, "--push", text(store)];
    args.extend(["--name", "whole", "--jobs", "1"]);
    args.extend(OPTIONS);
    args
}

/// Checks that three parts on three machines, of which one is killed and loses its disk, give the bytes of one build.
#[test]
fn parts_meet_in_a_store() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let whole = dir.path().join("whole");
    let mut args = vec!["build", text(&model), "-o", text(&whole)];
    args.extend(OPTIONS);
    json(0, &args);
    let store = dir.path().join("store");
    let folders = ["0", "1", "2"].map(|i| dir.path().join(format!("machine-{i}/part.anemoe")));
    let shares = ["0/3", "1/3", "2/3"];
    let manifest = store.join("bundles/whole/part-1of3.json");
    // One machine is killed once it has sent something.
    let mut child = anemoe(&part(&model, &folders[1], &store, shares[1]))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    while !manifest.exists() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = child.kill();
    let early = child.wait().unwrap().success();
    let sent: Value = serde_json::from_slice(&std::fs::read(&manifest).unwrap()).unwrap();
    std::fs::remove_dir_all(folders[1].parent().unwrap()).unwrap();
    let assembled = dir.path().join("elsewhere/whole.anemoe");
    let assemble = ["assemble", text(&assembled), "--pull", text(&store), "--name", "whole"];
    if !early {
        assert_eq!(sent["part"]["finished"], false);
        refused(&assemble, &["3 of 3 parts are not there or not finished (0/3, 1/3, 2/3)"]);
    }
    refused(
        &["pull", text(&store), text(&assembled), "--name", "whole"],
        &["in parts only (1/3)", "assemble"],
    );
    // All machines run at the same time.
    let children: Vec<_> = folders
        .iter()
        .zip(shares)
        .map(|(folder, share)| {
            let mut args = part(&model, folder, &store, share);
            args.push("--json");
            anemoe(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for (i, child) in children.into_iter().enumerate() {
        let (code, out, err) = finish(child.wait_with_output().unwrap());
        assert_eq!(code, 0, "{err}");
        let report: Value = serde_json::from_str(&out).unwrap();
        assert!(report["push"]["files"].as_u64().unwrap() > 5, "{report}");
        // Shards that the killed machine had sent are not built again.
        if i == 1 && !early {
            assert!(
                report["reused"].as_u64().unwrap() > 0 && err.contains("of this part were in"),
                "{report}\n{err}"
            );
        }
    }
    let report = json(0, &assemble);
    assert_eq!(report["shards"], report["reused"]);
    assert!(contents(&assembled) == contents(&whole));
    // The journal of the whole has the journals of all parts.
    let journal = json(0, &["journal", "show", text(&assembled)]).to_string();
    for share in shares {
        assert!(journal.contains(&format!("\"{share}\"")), "{share} is not in {journal}");
    }
    refused(&assemble, &["complete already"]);
    // A push of the whole bundle sends only its contract and its journal.
    let pushed = json(0, &["push", text(&assembled), text(&store), "--name", "whole"]);
    assert_eq!(pushed["files_sent"], 2, "{pushed}");
    // Parts of another build are refused.
    let other = dir.path().join("other.anemoe");
    let mut args = part(&model, &other, &store, "0/3");
    args.extend(["--max-context", "64"]);
    refused(&args, &["of a build with other options", "--name"]);
    assert!(!other.exists());
}

/// Checks that folders of parts are pushed by hand, and that an assembly goes on that had begun with fewer parts.
#[test]
fn folders_of_parts_are_pushed_and_assembled_in_two_steps() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("tiny-zaya");
    let whole = built(dir.path(), "whole");
    let store = dir.path().join("store");
    let folders = ["a", "b"].map(|name| dir.path().join(name));
    for (folder, share) in folders.iter().zip(["0/2", "1/2"]) {
        let mut args = vec!["build", text(&model), "-o", text(folder), "--shard", share, "--skip-gates"];
        args.extend(OPTIONS);
        let (code, _, err) = run(&args);
        assert_eq!(code, 0, "{err}");
        let report = json(0, &["push", text(folder), text(&store), "--name", "x"]);
        assert_eq!(report["parts"][0]["finished"], true, "{report}");
    }
    // The assembly goes into the folder of one of the parts.
    json(0, &["assemble", text(&folders[0]), "--pull", text(&store), "--name", "x"]);
    assert!(contents(&folders[0]) == contents(&whole));
    // A folder of another build is left alone.
    let other = dir.path().join("other");
    let mut args = vec![
        "build",
        text(&model),
        "-o",
        text(&other),
        "--shard",
        "0/2",
        "--skip-gates",
        "--max-context",
        "64",
    ];
    args.extend(OPTIONS);
    let (code, _, err) = run(&args);
    assert_eq!(code, 0, "{err}");
    let before = contents(&other);
    refused(&["assemble", text(&other), "--pull", text(&store), "--name", "x"], &["other options"]);
    assert!(contents(&other) == before);
    refused(&["assemble", text(&dir.path().join("y")), "--pull", text(&store)], &["no part of it is there"]);
}

#[test]
fn stores_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = built(dir.path(), "a.anemoe");
    let push = |store: &str, says: &[&str]| refused(&["push", text(&bundle), store], says);
    push("ftp://models/x", &["ftp://", "s3://BUCKET/PREFIX"]);
    push("az://models/x", &["AZURE_STORAGE_ACCOUNT_NAME is not set"]);
    push("s3://x", &["is not s3://BUCKET/PREFIX"]);
    let file = dir.path().join("file");
    std::fs::write(&file, "x").unwrap();
    push(text(&file), &["is not a folder"]);
    for name in ["../x", "a/b", ".x", ""] {
        refused(
            &["push", text(&bundle), text(dir.path()), &format!("--name={name}")],
            &["no name for a bundle"],
        );
    }
    refused(&["push", text(dir.path()), text(&file)], &["bundle"]);
    // A store in the bundle would become a part of the bundle.
    for store in [bundle.clone(), bundle.join("new"), bundle.join("shards")] {
        push(text(&store), &["lies in the bundle"]);
    }
    assert!(!bundle.join("objects").exists() && !bundle.join("new").exists());
    refused(&["assemble", text(&bundle), "--name", "x"], &["--pull"]);
}

/// An object store in this process, as far as one request at a time goes.
struct Bucket {
    server: TestServer,
    objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>>,
}

/// Change of an answer of the server.
type Twist = dyn Fn(&Asked, Reply) -> Reply + Send;

impl Bucket {
    fn new(twist: Box<Twist>) -> Bucket {
        let objects: Arc<Mutex<BTreeMap<String, Vec<u8>>>> = Arc::default();
        let kept = Arc::clone(&objects);
        let server = TestServer::start(move |asked| {
            let path = asked.path.split('?').next().unwrap().to_string();
            let mut kept = kept.lock().unwrap();
            let honest = match (asked.method.as_str(), kept.get(&path)) {
                ("PUT", _) => {
                    kept.insert(path, asked.body.clone());
                    Reply::new(200, "").with("etag", "\"x\"")
                }
                (_, Some(bytes)) => Reply::part(asked, bytes),
                (_, None) if path.trim_end_matches('/') == "/models" => {
                    Reply::new(200, list(&kept, &asked.path))
                }
                (_, None) => Reply::new(404, "<Error><Code>NoSuchKey</Code></Error>"),
            };
            twist(asked, honest)
        });
        Bucket { server, objects }
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        let mut command = anemoe(args);
        for name in [
            "AWS_ENDPOINT_URL_S3",
            "AWS_SESSION_TOKEN",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
            "AWS_SKIP_SIGNATURE",
        ] {
            command.env_remove(name);
        }
        command.env("AWS_ENDPOINT_URL", &self.server.address).env("AWS_ALLOW_HTTP", "true");
        command.env("AWS_ACCESS_KEY_ID", "key").env("AWS_SECRET_ACCESS_KEY", "s3cr3t");
        finish(command.output().unwrap())
    }

    fn passes(&self, args: &[&str]) -> String {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 0, "{args:?}\n{out}\n{err}");
        assert!(!(out.clone() + &err).contains("s3cr3t"));
        out
    }

    fn refuses(&self, args: &[&str], says: &[&str]) {
        let (code, out, err) = self.run(args);
        assert_eq!(code, 2, "{args:?}\n{out}\n{err}");
        assert!(!err.contains("panicked") && !err.contains("s3cr3t") && !err.contains("Signature="), "{err}");
        for text in says {
            assert!(err.contains(text), "{args:?}: `{text}` is not in\n{err}");
        }
    }
}

/// Lists the folders below a prefix, as XML of an object store.
fn list(objects: &BTreeMap<String, Vec<u8>>, path: &str) -> String {
    let prefix =
        path.split("prefix=").nth(1).unwrap_or_default().split('&').next().unwrap().replace("%2F", "/");
    let folders: std::collections::BTreeSet<String> = objects
        .keys()
        .filter_map(|key| key.strip_prefix(&format!("/models/{prefix}")))
        .filter_map(|rest| Some(rest.split_once('/')?.0.to_string()))
        .collect();
    let folders: String = folders
        .iter()
        .map(|f| format!("<CommonPrefixes><Prefix>{prefix}{f}/</Prefix></CommonPrefixes>"))
        .collect();
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?><ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
         <Name>models</Name><Prefix>{prefix}</Prefix><KeyCount>1</KeyCount><MaxKeys>1000</MaxKeys>\
         <IsTruncated>false</IsTruncated>{folders}</ListBucketResult>"
    )
}

#[test]
fn a_bucket_that_drops_and_stumbles_still_gives_the_bundle() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = built(dir.path(), "a.anemoe");
    let seen: Mutex<BTreeMap<String, usize>> = Mutex::default();
    // The first answer to each request is a 503; the second one for an object breaks off in the middle.
    let bucket = Bucket::new(Box::new(move |asked, reply| {
        let path = asked.path.split('?').next().unwrap().to_string();
        let mut seen = seen.lock().unwrap();
        let times = seen.entry(format!("{} {path}", asked.method)).or_default();
        *times += 1;
        let is_weight = path.contains("/objects/0") && asked.method == "GET";
        match *times {
            1 if path.contains("/objects/1") => Reply::new(503, "<Error><Code>SlowDown</Code></Error>"),
            1 if is_weight => Reply { cut: Some(reply.body.len() / 2), ..reply },
            _ => reply,
        }
    }));
    bucket.passes(&["push", text(&bundle), "s3://models/p"]);
    let target = dir.path().join("pulled.anemoe");
    bucket.passes(&["pull", "s3://models/p", text(&target), "--name", "a.anemoe"]);
    assert!(contents(&target) == contents(&bundle));
    let puts = bucket.server.asked().into_iter().filter(|a| a.method == "PUT");
    for put in puts {
        let signed = put.header("authorization").is_some_and(|text| text.contains("Signature="));
        assert!(put.header("x-amz-checksum-sha256").is_some() && signed, "{}", put.path);
    }
    assert!(bucket.server.asked().iter().any(|a| a.header("range").is_some()), "no download was taken up");
    // Nothing is sent twice.
    let again = bucket.passes(&["push", text(&bundle), "s3://models/p", "--json"]);
    assert_eq!(serde_json::from_str::<Value>(&again).unwrap()["files_sent"], 0);
    bucket.refuses(
        &["pull", "s3://models/p", text(&dir.path().join("b")), "--name", "b"],
        &["no bundle `b`", "a.anemoe"],
    );
}

#[test]
fn a_bucket_that_lies_is_not_believed() {
    let dir = tempfile::tempdir().unwrap();
    let bundle = built(dir.path(), "a.anemoe");
    let elsewhere = TestServer::start(|_| Reply::new(200, "x"));
    let other = elsewhere.address.clone();
    let mode = Arc::new(Mutex::new("honest"));
    let twisted = Arc::clone(&mode);
    let bucket = Bucket::new(Box::new(move |asked, reply| {
        let is_object = asked.path.contains("/objects/") && asked.method == "GET";
        match *twisted.lock().unwrap() {
            "length" if is_object => Reply::new(200, "short"),
            "bytes" if is_object && !reply.body.is_empty() => {
                let mut body = reply.body.clone();
                body[0] ^= 1;
                Reply { body, ..reply }
            }
            "redirect" if asked.method != "PUT" => Reply::new(307, "").with("location", format!("{other}/x")),
            "denied" => {
                Reply::new(403, "<Error><Code>InvalidAccessKeyId</Code><Message>no</Message></Error>")
            }
            "nobody" => Reply::new(404, "<Error><Code>NoSuchBucket</Code></Error>"),
            "checksum" if asked.method == "HEAD" && reply.status == 200 => {
                reply.with("x-amz-checksum-sha256", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
            }
            _ => reply,
        }
    }));
    let push = ["push", text(&bundle), "s3://models/p", "--json"];
    bucket.passes(&push);
    let target = dir.path().join("pulled.anemoe");
    let pull = ["pull", "s3://models/p", text(&target), "--name", "a.anemoe"];
    for (twist, says) in [
        ("length", "it has 5 bytes, not"),
        ("bytes", "its hash is"),
        ("redirect", "redirects to another server"),
        ("denied", "does not know this AWS_ACCESS_KEY_ID"),
        ("nobody", "no bucket `models`"),
    ] {
        *mode.lock().unwrap() = twist;
        bucket.refuses(&pull, &["s3://models/p/", says]);
        assert!(!target.exists());
    }
    assert!(elsewhere.asked().is_empty(), "an address that was signed for one server went to another");
    for (twist, says) in
        [("denied", "AWS_ACCESS_KEY_ID"), ("nobody", "no bucket `models`"), ("redirect", "AWS_REGION")]
    {
        *mode.lock().unwrap() = twist;
        bucket.refuses(&push, &[says]);
    }
    // If the server reports a wrong hash, the contents are sent again.
    *mode.lock().unwrap() = "checksum";
    let sent: Value = serde_json::from_str(&bucket.passes(&push)).unwrap();
    assert!(sent["files_sent"].as_u64().unwrap() > 17, "{sent}");
    // The server does not notice other bytes of the right length; --verify does.
    *mode.lock().unwrap() = "honest";
    let key = bucket.objects.lock().unwrap().keys().find(|k| k.contains("/objects/")).unwrap().clone();
    bucket.objects.lock().unwrap().get_mut(&key).unwrap()[0] ^= 1;
    let files_sent =
        |args: &[&str]| serde_json::from_str::<Value>(&bucket.passes(args)).unwrap()["files_sent"].clone();
    assert_eq!(files_sent(&push), 0);
    assert_eq!(files_sent(&[&push[..], &["--verify"]].concat()), 1);
    bucket.passes(&pull);
    assert!(contents(&target) == contents(&bundle));
}

#[test]
fn plain_http_and_half_credentials_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pull = |variables: &[(&str, &str)], says: &str| {
        let mut command = anemoe(&["pull", "s3://models", text(&dir.path().join("x"))]);
        for name in ["AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ALLOW_HTTP"] {
            command.env_remove(name);
        }
        let (code, out, err) = finish(command.envs(variables.iter().copied()).output().unwrap());
        assert!(code == 2 && err.contains(says), "{out}{err}");
    };
    pull(&[("AWS_ENDPOINT_URL", "http://127.0.0.1:9")], "AWS_ALLOW_HTTP");
    pull(&[("AWS_ACCESS_KEY_ID", "x")], "AWS_SECRET_ACCESS_KEY is not");
    pull(&[("AWS_ENDPOINT_URL", "127.0.0.1")], "not the address of a server");
}
