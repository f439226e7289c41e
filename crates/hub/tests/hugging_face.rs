//! Fetches checkpoints from a server that drops connections, lies, redirects, and asks for a token.

mod common;

use anemoe_hub::{HubSpec, Result, Snapshot};
use common::{Asked, COMMIT, Reply, TestRepository, TestServer, TestUser, git_hash, sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const TOKEN: &str = "hf_secret";

fn repository() -> TestRepository {
    let weights: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    let files = [
        ("config.json", br#"{"model_type": "zaya"}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        ("README.md", b"read me".to_vec()),
        ("pytorch_model.bin", vec![0; 99]),
        (
            "model.safetensors.index.json",
            br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#.to_vec(),
        ),
        ("m-1.safetensors", weights.clone()),
        ("m-2.safetensors", weights[..999].to_vec()),
    ];
    TestRepository { files: files.map(|(n, b)| (n.to_string(), b)).to_vec(), bare: false }
}

/// Shortcut of a test user to fetch whole files.
trait Fetches {
    fn fetch(&self, spec: &str) -> Result<Snapshot>;
    fn fetch_accepted(&self, spec: &str, accept: &dyn Fn(&Path) -> Result<()>) -> Result<Snapshot>;
    fn partial(&self, hash: &str) -> PathBuf;
}

impl Fetches for TestUser {
    fn fetch(&self, spec: &str) -> Result<Snapshot> {
        self.fetch_accepted(spec, &|_| Ok(()))
    }

    fn fetch_accepted(&self, spec: &str, accept: &dyn Fn(&Path) -> Result<()>) -> Result<Snapshot> {
        let spec = HubSpec::parse(Path::new(spec)).unwrap()?;
        let mut last = 0;
        self.hub()?.fetch(&spec, accept, &mut |p| {
            assert!(p.done <= p.total && !p.file.is_empty());
            last = p.done;
        })
    }

    fn partial(&self, hash: &str) -> PathBuf {
        self.cache().join("blobs").join(format!("{hash}.incomplete"))
    }
}

fn has_all(snapshot: &Snapshot, repository: &TestRepository) {
    for (name, bytes) in &repository.files {
        let found = std::fs::read(snapshot.path.join(name));
        match name.as_str() {
            "README.md" | "pytorch_model.bin" => assert!(found.is_err(), "{name}"),
            _ => assert_eq!(&found.unwrap(), bytes, "{name}"),
        }
    }
}

#[test]
fn needed_files_come_into_the_layout_of_hugging_face() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    let snapshot = client.fetch("hf:o/n").unwrap();
    has_all(&snapshot, &repository);
    assert_eq!(snapshot.pinned.to_string(), format!("hf:o/n@{COMMIT}"));
    assert_eq!(snapshot.path, client.cache().join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(client.cache().join("refs/main")).unwrap(), COMMIT);
    #[cfg(unix)]
    {
        let link = std::fs::read_link(snapshot.path.join("m-1.safetensors")).unwrap();
        let hash = sha256(repository.file("m-1.safetensors").unwrap());
        assert_eq!(link, Path::new("../../blobs").join(hash));
        let link = std::fs::read_link(snapshot.path.join("config.json")).unwrap();
        assert_eq!(link, Path::new("../../blobs").join(git_hash(repository.file("config.json").unwrap())));
    }
    assert!(server.asked_for("/resolve/").len() == 5 && server.asked_for("README").is_empty());
    // The second fetch asks only for the list; a fetch of a commit asks for nothing.
    assert_eq!(client.fetch("hf:o/n").unwrap(), snapshot);
    assert_eq!(server.asked_for("/resolve/").len(), 5);
    let asked = server.asked().len();
    assert_eq!(client.fetch(&format!("hf:o/n@{COMMIT}")).unwrap(), snapshot);
    assert_eq!(server.asked().len(), asked);
    // Files that other programs put there are used.
    std::fs::remove_file(snapshot.path.join("m-2.safetensors")).unwrap();
    std::fs::write(snapshot.path.join("m-2.safetensors"), repository.file("m-2.safetensors").unwrap())
        .unwrap();
    client.fetch("hf:o/n").unwrap();
    assert_eq!(server.asked_for("/resolve/").len(), 5);
}

#[test]
fn sizes_and_hashes_may_come_with_headers() {
    let repository = TestRepository { bare: true, ..repository() };
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    has_all(&TestUser::new(&server).fetch("hf:o/n").unwrap(), &repository);
    assert!(server.asked().iter().any(|a| a.method == "HEAD"));
    let server = TestServer::start(move |asked| {
        let reply = repository.answer(asked);
        Reply { headers: Vec::new(), ..reply }
    });
    let refused = TestUser::new(&server).fetch("hf:o/n").unwrap_err().to_string();
    assert!(refused.contains("does not tell its size and hash"), "{refused}");
}

#[test]
fn dropped_connections_are_taken_up_where_they_broke() {
    let repository = repository();
    let served = repository.clone();
    let count = AtomicUsize::new(0);
    let server = TestServer::start(move |asked| {
        let reply = served.answer(asked);
        match asked.path.ends_with("m-1.safetensors") {
            // Each connection sends 100 kB; the second one sends nothing.
            true => {
                let cut = if count.fetch_add(1, Ordering::SeqCst) == 1 { 0 } else { 100_000 };
                Reply { cut: Some(cut.min(reply.body.len())), ..reply }
            }
            false => reply,
        }
    });
    let client = TestUser::new(&server);
    has_all(&client.fetch("hf:o/n").unwrap(), &repository);
    let from: Vec<usize> = server.asked_for("m-1.safetensors").iter().map(Asked::from).collect();
    assert_eq!(from.len(), 13);
    assert_eq!(&from[..3], [0, 100_000, 100_000]);
    assert!(from[3..].windows(2).all(|w| w[1] > w[0]), "{from:?}");
}

#[test]
fn a_download_that_was_given_up_goes_on_later() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| {
        let reply = served.answer(asked);
        match asked.path.ends_with("m-1.safetensors") && asked.from() == 0 {
            true => Reply { cut: Some(50_000), ..reply },
            false if asked.path.ends_with("m-1.safetensors") => Reply::new(503, ""),
            false => reply,
        }
    });
    let client = TestUser::new(&server);
    let failed = client.fetch("hf:o/n").unwrap_err().to_string();
    assert!(failed.contains("status 503") && failed.contains("goes on from there"), "{failed}");
    let hash = sha256(repository.file("m-1.safetensors").unwrap());
    assert_eq!(client.partial(&hash).metadata().unwrap().len(), 50_000);
    let served = repository.clone();
    let better = TestServer::start(move |asked| served.answer(asked));
    let client = client.with("HF_ENDPOINT", &better.address);
    has_all(&client.fetch("hf:o/n").unwrap(), &repository);
    assert_eq!(better.asked_for("m-1.safetensors")[0].from(), 50_000);
    assert!(!client.partial(&hash).exists());
}

#[test]
fn servers_that_ignore_ranges_send_all_again() {
    let repository = repository();
    let served = repository.clone();
    let first = AtomicUsize::new(0);
    let server = TestServer::start(move |asked| {
        let plain = Asked { headers: Vec::new(), ..asked.clone() };
        let reply = served.answer(&plain);
        match asked.path.ends_with("m-1.safetensors") && first.fetch_add(1, Ordering::SeqCst) == 0 {
            true => Reply { cut: Some(70_000), ..reply },
            false => reply,
        }
    });
    has_all(&TestUser::new(&server).fetch("hf:o/n").unwrap(), &repository);
}

#[test]
fn lies_about_sizes_and_contents_are_found() {
    type Lie = fn(&Asked, Reply) -> Reply;
    let lies: [(Lie, &str); 4] = [
        // Other contents of the same size.
        (|_, r| Reply { body: r.body.iter().map(|b| b ^ 1).collect(), ..r }, "its hash is"),
        // More bytes than announced; fewer bytes announced.
        (|_, r| Reply { body: [r.body.clone(), vec![0; 5]].concat(), ..r }, "bytes, not"),
        (|_, r| Reply { length: Some(7), ..r }, "bytes, not"),
        // Another part than the one asked for.
        (
            |a, r| match a.from() {
                0 => Reply { cut: Some(10), ..r },
                _ => Reply::new(206, "x").with("content-range", "bytes 3-3/4"),
            },
            "another part",
        ),
    ];
    for (lie, says) in lies {
        let repository = repository();
        let server = TestServer::start(move |asked| {
            let reply = repository.answer(asked);
            if asked.path.ends_with("m-1.safetensors") { lie(asked, reply) } else { reply }
        });
        let client = TestUser::new(&server);
        let failed = client.fetch("hf:o/n").unwrap_err().to_string();
        assert!(failed.contains("m-1.safetensors") && failed.contains(says), "{says}: {failed}");
        let names: Vec<_> = std::fs::read_dir(client.cache().join("blobs"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 3, "{says}: {names:?}");
    }
}

#[test]
fn a_damaged_part_is_thrown_away() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    let hash = sha256(repository.file("m-1.safetensors").unwrap());
    std::fs::create_dir_all(client.cache().join("blobs")).unwrap();
    std::fs::write(client.partial(&hash), vec![7; 4000]).unwrap();
    has_all(&client.fetch("hf:o/n").unwrap(), &repository);
}

#[test]
fn a_token_goes_to_the_hub_and_to_no_other_server() {
    let repository = repository();
    let elsewhere_files = repository.clone();
    let elsewhere = TestServer::start(move |asked| {
        let name = asked.path.trim_start_matches("/signed/").split('?').next().unwrap().to_string();
        Reply::part(asked, elsewhere_files.file(&name).unwrap())
    });
    // Another name of the same machine counts as another server.
    let other = elsewhere.address.replace("127.0.0.1", "localhost");
    let served = repository.clone();
    let hub = TestServer::start(move |asked| {
        if asked.header("authorization") != Some(&format!("Bearer {TOKEN}")) {
            return Reply::new(401, "").with("x-error-code", "RepoNotFound");
        }
        match asked.path.rsplit_once('/') {
            Some((_, name)) if name.ends_with("safetensors") => {
                Reply::to(format!("{other}/signed/{name}?signature=abc"))
            }
            _ => served.answer(asked),
        }
    });
    let client = TestUser::new(&hub);
    let refused = client.fetch("hf:o/n").unwrap_err().to_string();
    assert!(refused.contains("HF_TOKEN"), "{refused}");
    let client = client.with("HF_TOKEN", TOKEN);
    has_all(&client.fetch("hf:o/n").unwrap(), &repository);
    assert_eq!(elsewhere.asked().len(), 2);
    for asked in elsewhere.asked() {
        assert_eq!(asked.header("authorization"), None, "{}", asked.path);
        assert!(!format!("{asked:?}").contains(TOKEN));
    }
    // A token from its file, and a wrong token.
    let client = TestUser::new(&hub);
    std::fs::write(client.dir.path().join("token"), TOKEN).unwrap();
    client.fetch("hf:o/n").unwrap();
    let client = TestUser::new(&hub).with("HF_TOKEN", "hf_wrong");
    let refused = client.fetch("hf:o/n").unwrap_err().to_string();
    assert!(refused.contains("may not see it") && !refused.contains("hf_wrong"), "{refused}");
}

#[test]
fn redirects_in_circles_and_out_of_http_end() {
    for (to, says) in
        [("/around", "redirects more than"), ("file:///etc/passwd", "not https"), ("http://", "nowhere")]
    {
        let server = TestServer::start(move |_| Reply::to(to));
        let failed = TestUser::new(&server).fetch("hf:o/n").unwrap_err().to_string();
        assert!(failed.contains(says), "{to}: {failed}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    for (status, code, says) in [
        (404, "RepoNotFound", "there is no"),
        (404, "RevisionNotFound", "no revision `x`"),
        (403, "GatedRepo", "accept its terms"),
        (401, "", "HF_TOKEN"),
        (418, "", "status 418"),
    ] {
        let server = TestServer::start(move |_| Reply::new(status, "").with("x-error-code", code));
        let failed = TestUser::new(&server).fetch("hf:o/n@x").unwrap_err().to_string();
        assert!(failed.contains(says) && failed.contains("hf:o/n@x"), "{status}: {failed}");
    }
}

#[test]
fn offline_uses_what_is_there() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    let snapshot = client.fetch("hf:o/n").unwrap();
    let asked = server.asked().len();
    let client = client.with("HF_HUB_OFFLINE", "1");
    assert_eq!(client.fetch("hf:o/n").unwrap(), snapshot);
    let missing = client.fetch("hf:o/n@other").unwrap_err().to_string();
    assert!(missing.contains("revision other") && missing.contains("--offline"), "{missing}");
    std::fs::remove_file(snapshot.path.join("m-2.safetensors")).unwrap();
    let missing = client.fetch("hf:o/n").unwrap_err().to_string();
    assert!(missing.contains("m-2.safetensors is not in"), "{missing}");
    assert_eq!(server.asked().len(), asked);
    // Without the server, the cache is used, with a warning.
    client.fetch("hf:o/n").unwrap_err();
    let dead = "http://127.0.0.1:9".to_string();
    let client = client.with("HF_ENDPOINT", &dead).with("HF_HUB_OFFLINE", "0");
    assert!(client.fetch("hf:o/n").is_err());
    std::fs::write(snapshot.path.join("m-2.safetensors"), repository.file("m-2.safetensors").unwrap())
        .unwrap();
    assert!(client.fetch("hf:o/n").unwrap().warning.unwrap().contains("what is in the cache is used"));
}

#[test]
fn a_model_that_is_refused_costs_no_download() {
    let repository = repository();
    let server = TestServer::start(move |asked| repository.answer(asked));
    let client = TestUser::new(&server);
    let refuse = |folder: &Path| {
        assert!(folder.join("config.json").is_file());
        Err(anemoe_hub::Error::unsupported(folder, "model"))
    };
    client.fetch_accepted("hf:o/n", &refuse).unwrap_err();
    assert!(server.asked_for(".safetensors").iter().all(|a| a.path.ends_with("index.json")));
    assert!(!client.cache().join("refs/main").exists());
}

#[test]
fn a_whole_file_counts_more_than_an_index_of_merged_shards() {
    let mut repository = repository();
    repository.files.retain(|(name, _)| !name.starts_with("m-"));
    repository.files.push(("model.safetensors".into(), vec![5; 99]));
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    has_all(&client.fetch("hf:o/n").unwrap(), &repository);
    drop(server);
    let offline = client.with("HF_HUB_OFFLINE", "1");
    has_all(&offline.fetch("hf:o/n").unwrap(), &repository);
}

#[test]
fn hostile_lists_stay_in_the_cache() {
    let hash = git_hash(b"x");
    for list in [
        serde_json::json!({"sha": "../../../x", "siblings": []}),
        serde_json::json!({"sha": COMMIT, "siblings": [{"rfilename": "../../config.json", "size": 1, "blobId": hash}]}),
        serde_json::json!({"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": 1, "blobId": "../../../evil"}]}),
        serde_json::json!({"sha": COMMIT, "siblings": [{"rfilename": "config.json", "size": u64::MAX / 2, "blobId": hash},
            {"rfilename": "model.safetensors", "size": u64::MAX / 2, "blobId": hash}]}),
        serde_json::json!([]),
    ] {
        let text = list.to_string();
        let server = TestServer::start(move |_| Reply::new(200, text.clone()));
        let client = TestUser::new(&server);
        client.fetch("hf:o/n").unwrap_err();
        let entries = std::fs::read_dir(client.dir.path()).unwrap();
        assert!(entries.map(|e| e.unwrap().file_name()).all(|name| name == "hub"), "{list}");
    }
}

#[test]
fn one_gguf_of_several_is_named() {
    let files = vec![("a-Q4_0.gguf".to_string(), vec![1; 10]), ("b-Q8_0.gguf".to_string(), vec![2; 20])];
    let repository = TestRepository { files, bare: false };
    let server = TestServer::start(move |asked| repository.answer(asked));
    let client = TestUser::new(&server);
    let several = client.fetch("hf:o/n").unwrap_err().to_string();
    assert!(several.contains("a-Q4_0.gguf, b-Q8_0.gguf"), "{several}");
    let snapshot = client.fetch("hf:o/n/b-Q8_0.gguf").unwrap();
    assert_eq!(std::fs::read(&snapshot.path).unwrap(), vec![2; 20]);
    assert!(server.asked_for("a-Q4_0").is_empty());
}

#[test]
fn all_parts_of_a_split_gguf_are_fetched() {
    let part = |i: u8| (format!("q4/m-0000{i}-of-00002.gguf"), vec![i; 10]);
    let repository = TestRepository { files: vec![part(2), part(1)], bare: false };
    let server = TestServer::start(move |asked| repository.answer(asked));
    for name in ["hf:o/n", "hf:o/n/q4/m-00001-of-00002.gguf", "hf:o/n/q4/m-00002-of-00002.gguf"] {
        let user = TestUser::new(&server);
        let first = user.fetch(name).unwrap().path;
        assert!(first.ends_with("q4/m-00001-of-00002.gguf"), "{}", first.display());
        assert_eq!(std::fs::read(&first).unwrap(), vec![1; 10]);
        assert_eq!(std::fs::read(first.with_file_name("m-00002-of-00002.gguf")).unwrap(), vec![2; 10]);
    }
}

#[test]
fn sizes_that_only_headers_tell_are_asked_for_again() {
    let repository = TestRepository { bare: true, ..repository() };
    let (served, count) = (repository.clone(), AtomicUsize::new(0));
    let server = TestServer::start(move |asked| match asked.method.as_str() {
        "HEAD" if count.fetch_add(1, Ordering::SeqCst) == 0 => Reply::new(503, ""),
        _ => served.answer(asked),
    });
    has_all(&TestUser::new(&server).fetch("hf:o/n").unwrap(), &repository);
}

#[cfg(unix)]
#[test]
fn pipes_in_the_cache_are_refused_at_once() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let hash = git_hash(repository.file("config.json").unwrap());
    for inside in
        [format!("models--o--n/blobs/{hash}.incomplete"), format!(".locks/models--o--n/{hash}.lock")]
    {
        let user = TestUser::new(&server);
        let pipe = user.dir.path().join("hub").join(inside);
        std::fs::create_dir_all(pipe.parent().unwrap()).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let refused = user.fetch("hf:o/n").unwrap_err().to_string();
        assert!(refused.contains("a pipe, where a regular file is expected"), "{refused}");
    }
}
