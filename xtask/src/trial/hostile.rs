//! Classes of damage, and the code that does each to the inputs of a case.

use super::cases::Case;
use super::choices::Choices;
use super::mutate::{self, FileFormat, format};
use super::process::make_fifo;
use super::snapshot::is_unfinished;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// Class of damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DamageClass {
    /// Random bytes of a file.
    Bytes,
    /// Structure of a file: lengths, counts, types, values.
    Structure,
    /// Missing files, or folders, links, pipes and devices in their place.
    Files,
    /// Names with escape sequences and bytes that are not UTF-8.
    Names,
    /// Values of options.
    Options,
    /// Files and folders in the output's place.
    Output,
}

impl DamageClass {
    /// Draws a class; most draws damage contents.
    pub fn choose(r: &mut Choices) -> DamageClass {
        match r.below(20) {
            0..5 => DamageClass::Bytes,
            5..13 => DamageClass::Structure,
            13..16 => DamageClass::Files,
            16 => DamageClass::Names,
            17..19 => DamageClass::Options,
            _ => DamageClass::Output,
        }
    }
}

/// Values of options: bounds, wrong types, names of kinds, paths.
const HOSTILE_VALUES: &str = " 0 1 2 -1 nan inf 1e309 0.5 4294967296 18446744073709551615 99999999999999999999999 \u{1b}[31m 1,1 4,1 \
    1,,2 1..0 1..99999999999 0/0 3/2 1/1 lut4 auto int4-block lut1-tensor in /dev/full /dev/zero no/such 1GiB main fp32";

/// A damaged case.
pub struct Damaged {
    /// Damage, in words.
    pub what: String,
    /// Arguments of the run.
    pub args: Vec<OsString>,
    /// Paths that may be created or changed besides the case's own.
    pub allowed: Vec<PathBuf>,
    /// True if the inputs are small, so that the run may take little memory only.
    pub is_small: bool,
}

/// Damages the inputs in `folder/in`, the outputs in `folder/out`, or the arguments.
pub fn damage(case: &Case, class: DamageClass, folder: &Path, r: &mut Choices) -> io::Result<Damaged> {
    let mut args: Vec<OsString> = vec![case.command.into()];
    args.extend(case.args.iter().map(OsString::from));
    let mut done = Damaged { what: String::new(), args, allowed: Vec::new(), is_small: true };
    match class {
        DamageClass::Bytes | DamageClass::Structure => contents(class, folder, &mut done, r)?,
        DamageClass::Files => files(folder, &mut done, r)?,
        DamageClass::Names => names(case, folder, &mut done, r)?,
        DamageClass::Options => options(case, &mut done, r),
        DamageClass::Output => output(case, folder, &mut done, r)?,
    }
    Ok(done)
}

/// Returns all files below `in`, sorted, without planted ones.
fn input_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    fn walk(path: &Path, all: &mut Vec<PathBuf>) -> io::Result<()> {
        for entry in fs::read_dir(path)? {
            let path = entry?.path();
            if path.is_dir() {
                walk(&path, all)?;
            } else if path.is_file() && !path.file_name().is_some_and(is_unfinished) {
                all.push(path);
            }
        }
        Ok(())
    }
    let mut all = Vec::new();
    walk(&folder.join("in"), &mut all)?;
    all.sort();
    Ok(all)
}

/// Draws an input file; every format is equally likely.
fn choose_file(folder: &Path, r: &mut Choices) -> io::Result<PathBuf> {
    let mut formats: BTreeMap<FileFormat, Vec<PathBuf>> = BTreeMap::new();
    for file in input_files(folder)? {
        formats.entry(format(&file)).or_default().push(file);
    }
    let keys: Vec<FileFormat> = formats.keys().copied().collect();
    let files = &formats[r.pick(&keys)];
    Ok(r.pick(files).clone())
}

fn contents(class: DamageClass, folder: &Path, done: &mut Damaged, r: &mut Choices) -> io::Result<()> {
    let path = choose_file(folder, r)?;
    let mut file = fs::read(&path)?;
    let times = 1 + r.below(3);
    for _ in 0..times {
        match class {
            DamageClass::Bytes => mutate::damage_bytes(&mut file, r),
            _ => mutate::structure(&mut file, format(&path), r),
        }
    }
    fs::write(&path, file)?;
    done.what = format!("{class:?} of {}, {times} times", relative(folder, &path));
    Ok(())
}

fn relative(folder: &Path, path: &Path) -> String {
    path.strip_prefix(folder).unwrap_or(path).display().to_string()
}

fn files(folder: &Path, done: &mut Damaged, r: &mut Choices) -> io::Result<()> {
    let file = choose_file(folder, r)?;
    // Sometimes damages the file's folder instead, but not `in` itself.
    let parent = file.parent().filter(|p| *p != folder.join("in") && r.once_in(4));
    let path = parent.unwrap_or(&file).to_path_buf();
    let aside = folder.join("aside");
    fs::rename(&path, &aside)?;
    // A text may come from a pipe, and its reader waits for the other end.
    let waits = ["text.txt", "known.tsv", "report.json"].iter().any(|name| path.ends_with(name));
    let link = |to: &Path, what| symlink(to, &path).map(|()| what);
    let what = match r.below(15) {
        0 | 1 => "missing",
        2 => fs::create_dir(&path).map(|()| "a folder")?,
        3 => {
            // A path to a bundle may be a link; its journal then lies at the link's target.
            if path.extension().is_some_and(|e| e == "anemoe") {
                done.allowed.push("aside/journal.jsonl".into());
            }
            link(&aside, "a link to itself elsewhere")?
        }
        4 => link("no/such/file".as_ref(), "a link to nothing")?,
        5 => link(&path, "a link to the link")?,
        6 if !waits => make_fifo(&path).map(|()| "a pipe")?,
        7 => link("/dev/zero".as_ref(), "a link to /dev/zero")?,
        8 => link("/dev/full".as_ref(), "a link to /dev/full")?,
        9 => link("/dev/null".as_ref(), "a link to /dev/null")?,
        10 => link("/dev/urandom".as_ref(), "a link to /dev/urandom")?,
        11 => {
            fs::rename(&aside, &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).map(|()| "unreadable")?
        }
        12 => File::create(&path).map(|_| "an empty file")?,
        13 => {
            // A sparse file: 4 GiB to read, nothing on disk.
            done.is_small = false;
            File::create(&path)?.set_len(4 << 30).map(|()| "4 GiB of zeros")?
        }
        _ => link("../..".as_ref(), "a link to a folder above")?,
    };
    done.what = format!("{} is {what}", relative(folder, &path));
    Ok(())
}

/// Gives an input a hostile name.
fn names(case: &Case, folder: &Path, done: &mut Damaged, r: &mut Choices) -> io::Result<()> {
    let input = *r.pick(&case.inputs().collect::<Vec<_>>());
    let ending = input.rsplit_once('.').map_or(String::new(), |(_, e)| format!(".{e}"));
    let hostile: [&[u8]; 9] = [
        b"a\x1b[31mred\x1b[0m",
        b"a\nb\r",
        b"\xff\xfe\x80",
        b"a b'\"$(x)`",
        "\u{202e}olleh\u{2066}".as_bytes(),
        b"\x07\x08\x7f",
        b"--help",
        b"a:b:c",
        b"\xc2\x9b31m",
    ];
    let mut name = r.pick(&hostile).to_vec();
    name.extend(ending.as_bytes());
    let name = OsString::from_vec(name);
    fs::rename(folder.join("in").join(input), folder.join("in").join(&name))?;
    let (old, new) = (format!("in/{input}").into_bytes(), Path::new("in").join(&name).into_os_string());
    for arg in &mut done.args {
        let text = arg.clone().into_vec();
        if text.starts_with(&old) {
            *arg = OsString::from_vec([new.as_bytes(), &text[old.len()..]].concat());
        }
    }
    let renamed =
        |path: PathBuf| path.strip_prefix(OsStr::from_bytes(&old)).map(|behind| Path::new(&new).join(behind));
    done.allowed.extend(case.allowed().into_iter().filter_map(|path| renamed(path).ok()));
    // Half of these inputs are damaged, too, so that the name occurs in an error message.
    if r.once_in(2) {
        contents(DamageClass::Bytes, folder, done, r)?;
    }
    done.what = format!("{input} is named {name:?}; {}", done.what);
    Ok(())
}

/// Gives an option a hostile value, or adds an option.
fn options(case: &Case, done: &mut Damaged, r: &mut Choices) {
    let edge = r.edge().to_string();
    let mut values: Vec<&str> = HOSTILE_VALUES.split(' ').collect();
    values.push(&edge);
    let value = *r.pick(&values);
    let options: Vec<usize> = (2..done.args.len())
        .filter(|&i| done.args[i - 1].to_str().is_some_and(|a| a.starts_with("--")))
        .filter(|&i| done.args[i].to_str().is_some_and(|a| !a.contains('/')))
        .collect();
    if case.options.is_empty() || (!options.is_empty() && r.once_in(3)) {
        match options.is_empty() {
            true => done.args.push(value.into()),
            false => done.args[*r.pick(&options)] = value.into(),
        }
    } else {
        done.args.push((*r.pick(&case.options)).into());
        done.args.push(value.into());
    }
    done.what = format!("arguments {:?}", &done.args[1..]);
}

/// Puts something in the output's place.
fn output(case: &Case, folder: &Path, done: &mut Damaged, r: &mut Choices) -> io::Result<()> {
    let Some(output) = case.output() else {
        done.what = "nothing".into();
        return Ok(());
    };
    let path = folder.join(output);
    let link = |to: &Path, what| symlink(to, &path).map(|()| what);
    let keep_in =
        |folder: &Path| fs::create_dir(folder).and_then(|()| fs::write(folder.join("KEEP"), "keep"));
    let what = match r.below(9) {
        0 => keep_in(&path).map(|()| "a folder with a file")?,
        1 => fs::write(&path, "keep").map(|()| "a file")?,
        2 => link("no/such/file".as_ref(), "a link to nothing")?,
        3 => link("/dev/full".as_ref(), "a link to /dev/full")?,
        4 => link("/dev/null".as_ref(), "a link to /dev/null")?,
        5 => link(&path, "a link to itself")?,
        6 => {
            keep_in(&folder.join("elsewhere"))?;
            // The link's target is the folder that the user named.
            done.allowed.push("elsewhere".into());
            link("../elsewhere".as_ref(), "a link to a folder")?
        }
        7 => fs::set_permissions(folder.join("out"), fs::Permissions::from_mode(0o555))
            .map(|()| "in a folder that cannot be written")?,
        _ => {
            for arg in done.args.iter_mut().filter(|arg| arg.to_str() == Some(output)) {
                *arg = format!("no/such/{output}").into();
            }
            // A command may create the folder or refuse.
            done.allowed.push("no".into());
            "in a folder that is missing"
        }
    };
    done.what = format!("{output} is {what}");
    Ok(())
}
