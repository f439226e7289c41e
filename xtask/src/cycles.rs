//! `cargo xtask cycles`: files of a crate that use each other.
//!
//! A file uses another file when it names one of its items. A `mod.rs` that declares and re-exports modules does not
//! use them, but one that names their items does. Code for tests does not count.

use crate::module_tree::{self, Crate, ItemUse};
use crate::task::{Passed, root};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Items by the file that uses them, then by the file that declares them.
type Edges = BTreeMap<usize, BTreeMap<usize, Vec<String>>>;

/// Prints every cycle of the named crates, or of all crates. Passes when there is none.
pub fn check(crates: &[String]) -> Passed {
    let all = module_tree::read_workspace(&root())?;
    if let Some(unknown) = crates.iter().find(|name| !all.iter().any(|c| c.name == **name)) {
        return Err(format!("{unknown}: no such crate").into());
    }
    let mut count = 0;
    for read in all.iter().filter(|c| crates.is_empty() || crates.contains(&c.name)) {
        let edges = edges(&module_tree::find_references(read));
        for cycle in find_cycles(&edges) {
            println!("{}: {}", read.name, describe(read, &edges, &cycle));
            count += 1;
        }
    }
    match count {
        0 => println!("no file uses another that uses it"),
        _ => println!("{count} cycles"),
    }
    Ok(count == 0)
}

fn edges(references: &[ItemUse]) -> Edges {
    let mut edges = Edges::new();
    for reference in references {
        let items = edges.entry(reference.from).or_default().entry(reference.to).or_default();
        items.push(reference.item.clone());
    }
    edges
}

/// Finds the shortest cycle through each edge that lies on a cycle. Returns each cycle once, short ones first.
fn find_cycles(edges: &Edges) -> Vec<Vec<usize>> {
    let mut found = BTreeSet::new();
    for (&from, targets) in edges {
        for &to in targets.keys() {
            let Some(mut cycle) = shortest(edges, to, from) else { continue };
            let least = (0..cycle.len()).min_by_key(|&i| cycle[i]).unwrap_or(0);
            cycle.rotate_left(least);
            found.insert((cycle.len(), cycle));
        }
    }
    found.into_iter().map(|(_, cycle)| cycle).collect()
}

/// Returns the files on a shortest path, both ends included; `None` where no path exists.
fn shortest(edges: &Edges, start: usize, end: usize) -> Option<Vec<usize>> {
    let mut before = BTreeMap::from([(start, start)]);
    let mut queue = VecDeque::from([start]);
    while let Some(file) = queue.pop_front() {
        if file == end {
            let mut way = vec![end];
            let mut at = end;
            while at != start {
                at = before[&at];
                way.push(at);
            }
            way.reverse();
            return Some(way);
        }
        for &next in edges.get(&file).into_iter().flat_map(|targets| targets.keys()) {
            before.entry(next).or_insert_with(|| {
                queue.push_back(next);
                file
            });
        }
    }
    None
}

/// Writes a cycle as text: `a.rs -> b.rs (Item, other) -> a.rs (Third)`.
fn describe(read: &Crate, edges: &Edges, cycle: &[usize]) -> String {
    let mut text = read.files[cycle[0]].display().to_string();
    for (i, from) in cycle.iter().enumerate() {
        let to = cycle[(i + 1) % cycle.len()];
        let items = edges[from][&to].join(", ");
        text += &format!(" -> {} ({items})", read.files[to].display());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[(&str, &str)]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = folder.path().join("src").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let read = Crate::read(folder.path()).unwrap();
        let edges = edges(&module_tree::find_references(&read));
        find_cycles(&edges).iter().map(|cycle| describe(&read, &edges, cycle)).collect()
    }

    #[test]
    fn a_parent_and_a_child_that_use_each_other_are_a_cycle() {
        let cycles = of(&[
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod c; pub struct A; pub fn f() { c::g() }"),
            ("a/c.rs", "use super::A; pub fn g() -> Option<A> { None }"),
            ("b.rs", "use crate::a::A; pub fn h(_: A) {}"),
        ]);
        assert_eq!(cycles, ["a/mod.rs -> a/c.rs (g) -> a/mod.rs (A)"]);
    }

    #[test]
    fn re_exports_and_tests_are_no_uses() {
        let cycles = of(&[
            ("lib.rs", "mod a; mod b; pub use a::A; pub use b::*;"),
            ("a.rs", "pub struct A; #[cfg(test)] mod tests { use crate::B; fn f(_: B) {} }"),
            ("b.rs", "pub struct B(crate::A);"),
        ]);
        assert!(cycles.is_empty(), "{cycles:?}");
    }

    #[test]
    fn names_are_followed_through_re_exports_globs_macros_and_imports_of_functions() {
        let cycles = of(&[
            ("lib.rs", "mod a; mod b; mod c; pub use a::*;"),
            ("a.rs", "pub struct A; fn f() { println!(\"{}\", crate::b::X) }"),
            ("b.rs", "pub const X: usize = 1; fn f() { use super::c; c::g() }"),
            ("c.rs", "pub fn g() { let _ = crate::A; }"),
        ]);
        assert_eq!(cycles, ["a.rs -> b.rs (X) -> c.rs (g) -> a.rs (A)"]);
    }
}
