//! Opens checkpoints of which only ranges of weights are fetched.

mod common;

use anemoe_hub::{HubSpec, Peeked, Result};
use common::{Asked, COMMIT, Reply, TestRepository, TestServer, TestUser, sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

const TOKEN: &str = "hf_secret";
const LARGE: &str = "m-1.safetensors";
const SMALL: &str = "m-2.safetensors";
/// Bytes fetched first from a file.
const HEAD: usize = 256 << 10;

fn weights() -> Vec<u8> {
    (0..300_000u32).flat_map(u32::to_le_bytes).collect()
}

fn repository() -> TestRepository {
    let files = [
        ("config.json", br#"{"model_type": "zaya"}"#.to_vec()),
        ("tokenizer.json", b"{}".to_vec()),
        (
            "model.safetensors.index.json",
            br#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#.to_vec(),
        ),
        (LARGE, weights()),
        (SMALL, weights()[..999].to_vec()),
    ];
    TestRepository { files: files.map(|(n, b)| (n.to_string(), b)).to_vec(), bare: false }
}

/// Shortcut of a test user to read files in ranges.
trait Looks {
    fn peek(&self, spec: &str) -> Result<Peeked>;
    fn fetch(&self, spec: &str) -> Result<PathBuf>;
    fn blobs(&self) -> Vec<String>;
}

impl Looks for TestUser {
    fn peek(&self, spec: &str) -> Result<Peeked> {
        let spec = HubSpec::parse(Path::new(spec)).unwrap()?;
        self.hub()?.peek(&spec, &|_| Ok(()), &mut |p| assert!(p.done <= p.total && !p.file.is_empty()))
    }

    fn fetch(&self, spec: &str) -> Result<PathBuf> {
        let spec = HubSpec::parse(Path::new(spec)).unwrap()?;
        self.hub()?.fetch(&spec, &|_| Ok(()), &mut |_| {}).map(|s| s.path)
    }

    fn blobs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.cache().join("blobs")).unwrap();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }
}

fn read(peeked: &Peeked, start: usize, length: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; length];
    peeked.weights[LARGE].read_range(start as u64, &mut out)?;
    Ok(out)
}

/// Returns the ranges of the large file that were asked for.
fn ranges(server: &TestServer) -> Vec<(usize, usize)> {
    server.asked_for(LARGE).iter().map(|a| (a.from(), a.last().expect("a range") + 1)).collect()
}

#[test]
fn heads_and_ranges_come_once_and_no_file_looks_whole() {
    let served = repository();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    let peeked = client.peek("hf:o/n").unwrap();
    assert_eq!(peeked.snapshot.pinned.to_string(), format!("hf:o/n@{COMMIT}"));
    assert!(peeked.snapshot.path.join("config.json").is_file());
    assert_eq!(peeked.weights[LARGE].bytes(), 1_200_000);
    assert_eq!(ranges(&server), [(0, HEAD)]);
    assert_eq!(read(&peeked, 0, 8).unwrap(), weights()[..8]);
    assert_eq!(read(&peeked, 800_000, 10).unwrap(), weights()[800_000..800_010]);
    // Neighbouring bytes came with it; a range beyond both ends asks only for the gaps.
    assert_eq!(read(&peeked, 800_050, 10).unwrap(), weights()[800_050..800_060]);
    assert_eq!(read(&peeked, 799_990, 70_000).unwrap(), weights()[799_990..869_990]);
    assert_eq!(read(&peeked, 1_199_999, 1).unwrap(), weights()[1_199_999..]);
    let ahead = 800_000 + (64 << 10);
    let expected =
        [(0, HEAD), (800_000, ahead), (799_990, 800_000), (ahead, 869_990), (1_199_999, 1_200_000)];
    assert_eq!(ranges(&server), expected);
    assert!(read(&peeked, 1_199_999, 2).unwrap_err().to_string().contains("which has 1200000"));
    // Nothing in Hugging Face's layout claims that the weights are there.
    assert!(!peeked.snapshot.path.join(LARGE).exists() && !peeked.snapshot.path.join(SMALL).exists());
    assert_eq!(client.blobs().len(), 3);
    // The next peek asks for nothing that is cached; a peek at a commit asks for nothing at all.
    let again = client.peek("hf:o/n").unwrap();
    assert_eq!(read(&again, 799_990, 70_000).unwrap(), weights()[799_990..869_990]);
    assert_eq!(ranges(&server).len(), expected.len());
    let asked = server.asked().len();
    let pinned = client.peek(&format!("hf:o/n@{COMMIT}")).unwrap();
    assert_eq!(read(&pinned, 800_000, 10).unwrap(), weights()[800_000..800_010]);
    assert_eq!(server.asked().len(), asked);
    // Offline, cached ranges are read and missing ones are named; a build is told that files are missing.
    let offline = client.with("HF_HUB_OFFLINE", "1");
    let kept = offline.peek("hf:o/n").unwrap();
    assert_eq!(read(&kept, 0, 100).unwrap(), weights()[..100]);
    let missing = read(&kept, 600_000, 4).unwrap_err().to_string();
    assert!(missing.contains("the part 600000..600004 of m-1.safetensors is not in"), "{missing}");
    assert!(missing.contains("--offline"), "{missing}");
    let missing = offline.fetch("hf:o/n").unwrap_err().to_string();
    assert!(missing.contains("m-1.safetensors is not in"), "{missing}");
    assert_eq!(server.asked().len(), asked);
}

#[test]
fn whole_files_are_used_and_parts_of_them_forgotten() {
    let repository = repository();
    let served = repository.clone();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    client.peek("hf:o/n").unwrap();
    let log = client.cache().join("ranges").join(sha256(&weights()));
    assert!(log.is_file());
    let path = client.fetch("hf:o/n").unwrap();
    assert_eq!(std::fs::read(path.join(LARGE)).unwrap(), weights());
    assert!(!log.exists());
    assert!(client.peek("hf:o/n").unwrap().weights.is_empty());
    assert!(client.with("HF_HUB_OFFLINE", "1").peek("hf:o/n").unwrap().weights.is_empty());
    // One of two files is there.
    let client = TestUser::new(&server);
    let folder = client.peek("hf:o/n").unwrap().snapshot.path;
    std::fs::write(folder.join(SMALL), repository.file(SMALL).unwrap()).unwrap();
    let peeked = client.peek("hf:o/n").unwrap();
    assert_eq!(peeked.weights.keys().collect::<Vec<_>>(), [LARGE]);
}

#[test]
fn offline_without_an_earlier_look_says_what_is_missing() {
    let server = TestServer::start(|_| panic!("nothing is asked"));
    let client = TestUser::new(&server).with("HF_HUB_OFFLINE", "1");
    let missing = client.peek("hf:o/n").err().unwrap().to_string();
    assert!(missing.contains("revision main is not in") && missing.contains("--offline"), "{missing}");
}

#[test]
fn a_server_that_is_gone_leaves_what_came() {
    let served = repository();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    client.peek("hf:o/n").unwrap();
    let client = client.with("HF_ENDPOINT", "http://127.0.0.1:9");
    let peeked = client.peek("hf:o/n").unwrap();
    assert!(peeked.snapshot.warning.as_ref().unwrap().contains("what is in the cache is used"));
    assert_eq!(read(&peeked, 0, 100).unwrap(), weights()[..100]);
}

#[test]
fn a_server_without_ranges_is_fetched_from_whole_and_that_is_said() {
    let served = repository();
    let server = TestServer::start(move |asked| {
        let plain = Asked { headers: Vec::new(), ..asked.clone() };
        served.answer(&plain)
    });
    let client = TestUser::new(&server);
    let peeked = client.peek("hf:o/n").unwrap();
    assert!(peeked.weights.is_empty());
    assert!(peeked.snapshot.warning.unwrap().contains("no parts of files"));
    assert_eq!(std::fs::read(peeked.snapshot.path.join(LARGE)).unwrap(), weights());
}

#[test]
fn ranges_that_stop_coming_are_an_error_that_says_so() {
    let served = repository();
    let server = TestServer::start(move |asked| match asked.from() >= HEAD {
        true => served.answer(&Asked { headers: Vec::new(), ..asked.clone() }),
        false => served.answer(asked),
    });
    let peeked = TestUser::new(&server).peek("hf:o/n").unwrap();
    let failed = read(&peeked, 500_000, 10).unwrap_err().to_string();
    assert!(failed.contains("whole files alone") && failed.contains(LARGE), "{failed}");
}

#[test]
fn dropped_connections_are_taken_up_where_they_broke() {
    let served = repository();
    let count = AtomicUsize::new(0);
    let server = TestServer::start(move |asked| {
        let reply = served.answer(asked);
        match asked.path.ends_with(LARGE) {
            true => {
                let cut = if count.fetch_add(1, Ordering::SeqCst) == 1 { 0 } else { 100_000 };
                Reply { cut: Some(cut.min(reply.body.len())), ..reply }
            }
            false => reply,
        }
    });
    let peeked = TestUser::new(&server).peek("hf:o/n").unwrap();
    assert_eq!(read(&peeked, 0, HEAD).unwrap(), weights()[..HEAD]);
    let from: Vec<usize> = ranges(&server).iter().map(|r| r.0).collect();
    assert_eq!(from, [0, 100_000, 100_000, 200_000]);
}

#[test]
fn lies_about_ranges_are_found() {
    type Lie = fn(Reply) -> Reply;
    let lies: [(Lie, &str); 5] = [
        (|r| r.without_headers().with("content-range", "bytes 5-9/1200000"), "another part"),
        (
            |r| r.without_headers().with("content-range", "bytes 0-9/1152921504606846976"),
            "bytes, not 1200000",
        ),
        (|r| r.without_headers(), "does not say which part"),
        (|_| Reply::new(416, ""), "status 416"),
        (|_| Reply::new(404, "").with("x-error-code", "EntryNotFound"), "m-1.safetensors"),
    ];
    for (lie, says) in lies {
        let served = repository();
        let server = TestServer::start(move |asked| {
            let reply = served.answer(asked);
            if asked.path.ends_with(LARGE) { lie(reply) } else { reply }
        });
        let client = TestUser::new(&server);
        let failed = client.peek("hf:o/n").err().expect(says).to_string();
        assert!(failed.contains(says) && failed.contains("hf:o/n"), "{says}: {failed}");
        assert!(!client.cache().join("refs/main").exists());
    }
    // Bytes beyond the request are not read, and an endless announced length takes no memory.
    for lie in [(|r| Reply { body: weights(), ..r }) as Lie, |r| Reply { length: Some(usize::MAX / 2), ..r }]
    {
        let served = repository();
        let server = TestServer::start(move |asked| {
            let reply = served.answer(asked);
            if asked.path.ends_with(LARGE) { lie(reply) } else { reply }
        });
        let peeked = TestUser::new(&server).peek("hf:o/n").unwrap();
        assert_eq!(read(&peeked, 0, HEAD).unwrap(), weights()[..HEAD]);
    }
}

#[test]
fn a_token_goes_to_the_hub_alone_and_a_redirect_is_asked_again_when_it_ran_out() {
    let elsewhere_files = repository();
    let left = AtomicUsize::new(2);
    let elsewhere = TestServer::start(move |asked| {
        // Each address is valid for two requests.
        if left.fetch_sub(1, Ordering::SeqCst) == 0 {
            left.store(2, Ordering::SeqCst);
            return Reply::new(403, "");
        }
        let name = asked.path.trim_start_matches("/signed/").split('?').next().unwrap().to_string();
        Reply::part(asked, elsewhere_files.file(&name).unwrap())
    });
    let other = elsewhere.address.replace("127.0.0.1", "localhost");
    let served = TestRepository { files: repository().files, bare: false };
    let hub = TestServer::start(move |asked| {
        if asked.header("authorization") != Some(&format!("Bearer {TOKEN}")) {
            return Reply::new(401, "");
        }
        match asked.path.rsplit_once('/') {
            Some((_, LARGE)) => Reply::to(format!("{other}/signed/{LARGE}?signature=abc")),
            _ => served.answer(asked),
        }
    });
    let peeked = TestUser::new(&hub).with("HF_TOKEN", TOKEN).peek("hf:o/n").unwrap();
    for start in [400_000, 600_000, 800_000] {
        assert_eq!(read(&peeked, start, 10).unwrap(), weights()[start..start + 10]);
    }
    // Header and first range, a refusal, then two more; the hub was asked twice.
    assert_eq!((elsewhere.asked().len(), hub.asked_for(LARGE).len()), (5, 2));
    for asked in elsewhere.asked() {
        assert!(!format!("{asked:?}").contains(TOKEN));
    }
}

#[test]
fn a_damaged_log_comes_again() {
    let served = repository();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    client.peek("hf:o/n").unwrap();
    let log = client.cache().join("ranges").join(sha256(&weights()));
    let mut bytes = std::fs::read(&log).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&log, bytes).unwrap();
    let peeked = client.peek("hf:o/n").unwrap();
    assert_eq!(read(&peeked, 0, HEAD).unwrap(), weights()[..HEAD]);
    assert_eq!(ranges(&server), [(0, HEAD), (0, HEAD)]);
}

#[test]
fn a_model_that_is_refused_costs_no_range() {
    let served = repository();
    let server = TestServer::start(move |asked| served.answer(asked));
    let client = TestUser::new(&server);
    let spec = HubSpec::parse(Path::new("hf:o/n")).unwrap().unwrap();
    let refuse = |folder: &Path| Err(anemoe_hub::Error::unsupported(folder, "model"));
    assert!(client.hub().unwrap().peek(&spec, &refuse, &mut |_| {}).is_err());
    assert!(server.asked_for("m-").is_empty());
}
