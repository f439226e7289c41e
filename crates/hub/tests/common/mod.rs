//! A server for tests: one thread, one request per connection, and faults that a test chooses.
#![allow(dead_code)]

use anemoe_hub::{Hub, HubSettings, Result};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// A request as received.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    /// Path, with the query after the `?`.
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Asked {
    /// Returns a header by its lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// Returns the first byte asked for; 0 without a range.
    pub fn from(&self) -> usize {
        self.range().map_or(0, |(from, _)| from.parse().unwrap())
    }

    /// Returns the last byte asked for, where the range names it.
    pub fn last(&self) -> Option<usize> {
        self.range().and_then(|(_, last)| last.parse().ok())
    }

    fn range(&self) -> Option<(&str, &str)> {
        self.header("range")?.strip_prefix("bytes=")?.split_once('-')
    }
}

/// An answer of the server.
#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// Bytes of the body after which the connection is dropped.
    pub cut: Option<usize>,
    /// Announced length, where it is wrong.
    pub length: Option<usize>,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, body: body.into(), ..Reply::default() }
    }

    pub fn with(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn without_headers(self) -> Reply {
        Reply { headers: Vec::new(), ..self }
    }

    pub fn to(location: impl Into<String>) -> Reply {
        Reply::new(302, "").with("location", location)
    }

    /// Makes the answer to a request for contents, in the range that it asks for.
    pub fn part(asked: &Asked, all: &[u8]) -> Reply {
        let from = asked.from();
        match asked.last().or((from > 0).then(|| all.len().saturating_sub(1))) {
            None => Reply::new(200, all),
            Some(_) if from >= all.len() => Reply::new(416, ""),
            Some(last) => {
                let last = last.min(all.len() - 1);
                Reply::new(206, &all[from..=last])
                    .with("content-range", format!("bytes {from}-{last}/{}", all.len()))
            }
        }
    }
}

/// A running server; dropping the value stops it.
pub struct TestServer {
    pub address: String,
    asked: Arc<Mutex<Vec<Asked>>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    pub fn start(answer: impl Fn(&Asked) -> Reply + Send + 'static) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let (asked, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (kept, ended) = (Arc::clone(&asked), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if ended.load(Ordering::SeqCst) {
                    return;
                }
                let Ok(mut stream) = stream else { continue };
                let Some(request) = read_request(&mut stream) else { continue };
                kept.lock().unwrap().push(request.clone());
                write_reply(&mut stream, &request, &answer(&request));
            }
        });
        TestServer { address, asked, stop, thread: Some(thread) }
    }

    /// Returns the requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// Returns the requests whose path contains a text.
    pub fn asked_for(&self, text: &str) -> Vec<Asked> {
        self.asked().into_iter().filter(|a| a.path.contains(text)).collect()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address.trim_start_matches("http://"));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_request(stream: &mut TcpStream) -> Option<Asked> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_string(), words.next()?.to_string());
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
    }
    let length = headers.iter().find(|(n, _)| n == "content-length").map_or(0, |(_, v)| v.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Asked { method, path, headers, body })
}

fn write_reply(stream: &mut TcpStream, asked: &Asked, reply: &Reply) {
    let mut head = format!("HTTP/1.1 {} X\r\nconnection: close\r\n", reply.status);
    head += &format!("content-length: {}\r\n", reply.length.unwrap_or(reply.body.len()));
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let body = match asked.method.as_str() {
        "HEAD" => &[][..],
        _ => &reply.body[..reply.cut.unwrap_or(reply.body.len())],
    };
    // The server ignores a client that disconnects early.
    let _ = stream.write_all((head + "\r\n").as_bytes()).and_then(|()| stream.write_all(body));
}

/// Computes the hash by which the hub names a small file: git's SHA-1 of a blob.
pub fn git_hash(bytes: &[u8]) -> String {
    use sha1::{Digest, Sha1};
    let mut hasher = Sha1::new_with_prefix(format!("blob {}\0", bytes.len()));
    hasher.update(bytes);
    hasher.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Computes the hash by which the hub names a large file.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha256};
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// The commit of every test repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A repository of files, with its list.
#[derive(Clone, Default)]
pub struct TestRepository {
    pub files: Vec<(String, Vec<u8>)>,
    /// True if the list omits sizes and hashes, so that only headers tell them.
    pub bare: bool,
}

impl TestRepository {
    /// Makes a repository of the files of a folder.
    pub fn of(folder: &Path) -> TestRepository {
        let entries = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_file());
        let file = |p: std::path::PathBuf| {
            (p.file_name().unwrap().to_str().unwrap().to_string(), std::fs::read(p).unwrap())
        };
        let mut files: Vec<_> = entries.map(file).collect();
        files.sort();
        TestRepository { files, bare: false }
    }

    pub fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|(n, _)| n == name).map(|(_, bytes)| bytes.as_slice())
    }

    fn list(&self) -> String {
        let one = |(name, bytes): &(String, Vec<u8>)| match (self.bare, name.ends_with(".safetensors")) {
            (true, _) => serde_json::json!({"rfilename": name}),
            (_, true) => {
                serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": git_hash(b"pointer"),
                "lfs": {"sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134}})
            }
            (_, false) => {
                serde_json::json!({"rfilename": name, "size": bytes.len(), "blobId": git_hash(bytes)})
            }
        };
        let siblings: Vec<_> = self.files.iter().map(one).collect();
        serde_json::json!({"id": "o/n", "sha": COMMIT, "siblings": siblings}).to_string()
    }

    /// Returns the answer of an honest hub to a request.
    pub fn answer(&self, asked: &Asked) -> Reply {
        if asked.path.starts_with("/api/models/") {
            return Reply::new(200, self.list());
        }
        let name = asked.path.split(&format!("/resolve/{COMMIT}/")).nth(1).unwrap_or_default();
        match self.file(name) {
            None => Reply::new(404, "").with("x-error-code", "EntryNotFound"),
            Some(bytes) => {
                let etag = if name.ends_with(".safetensors") { sha256(bytes) } else { git_hash(bytes) };
                Reply::part(asked, bytes).with("etag", format!("\"{etag}\"")).with("x-repo-commit", COMMIT)
            }
        }
    }
}

/// A user of the hub, with its own cache and variables.
pub struct TestUser {
    pub dir: tempfile::TempDir,
    variables: Vec<(&'static str, String)>,
}

impl TestUser {
    pub fn new(server: &TestServer) -> TestUser {
        TestUser {
            dir: tempfile::tempdir().unwrap(),
            variables: vec![("HF_ENDPOINT", server.address.clone())],
        }
    }

    /// Sets a variable, replacing an earlier value.
    pub fn with(mut self, name: &'static str, value: &str) -> TestUser {
        self.variables.retain(|(n, _)| *n != name);
        self.variables.push((name, value.into()));
        self
    }

    /// Makes access to the hub by the user's variables.
    pub fn hub(&self) -> Result<Hub> {
        Hub::new(HubSettings::from_variables(|name| match name {
            "HF_HOME" => Some(self.dir.path().into()),
            _ => self.variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()),
        })?)
    }

    /// Returns the cache folder of the repository `o/n`.
    pub fn cache(&self) -> PathBuf {
        self.dir.path().join("hub/models--o--n")
    }
}
