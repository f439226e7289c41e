//! The tree of modules: files, the names that each module declares or imports, its items.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, ItemMod, UseTree, Visibility};

/// Modules of a crate, without code for tests.
pub struct Crate {
    /// Name of the crate's folder.
    pub name: String,
    /// Files, relative to `src`.
    pub files: Vec<PathBuf>,
    /// Modules; the first is the root.
    pub modules: Vec<Module>,
    /// Files of macros by name: macros are found by textual order, not by path.
    pub macros: BTreeMap<String, usize>,
}

/// A module: a file, or a `mod` block in a file.
#[derive(Default)]
pub struct Module {
    /// Index into [`Crate::files`].
    pub file: usize,
    /// Index of the parent; `None` for the root.
    pub parent: Option<usize>,
    /// Indices of modules declared here, by name.
    pub children: BTreeMap<String, usize>,
    /// Names of items declared here.
    pub declared: BTreeMap<String, Declared>,
    /// Names imported by `use`, with their paths.
    pub imports: BTreeMap<String, Vec<String>>,
    /// Paths of glob imports, `use path::*`.
    pub globs: Vec<Vec<String>>,
    /// Paths of private imports; they count as uses, re-exports do not.
    pub private_imports: Vec<Vec<String>>,
    /// Items, without modules and imports.
    pub items: Vec<Item>,
}

/// Kind of a declared item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    /// A struct, enum, union, trait or type alias.
    Type,
    /// Anything else.
    Other,
}

/// Target of a path.
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved {
    /// A module.
    Module(usize),
    /// An item: index of the file that declares it, and its name.
    Item(usize, String),
}

/// Most imports of imports that are followed; more mean a cycle.
const MAX_HOPS: usize = 16;

impl Crate {
    /// Reads the crate in `folder`.
    pub fn read(folder: &Path) -> Result<Crate, Box<dyn std::error::Error>> {
        let name = folder.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let source = folder.join("src");
        let mut made = Crate { name, files: Vec::new(), modules: Vec::new(), macros: BTreeMap::new() };
        for root in ["lib.rs", "main.rs"] {
            if source.join(root).is_file() {
                made.read_file(&source, Path::new(root), None)?;
                return Ok(made);
            }
        }
        Err(format!("{}: neither lib.rs nor main.rs", source.display()).into())
    }

    fn read_file(
        &mut self,
        source: &Path,
        file: &Path,
        parent: Option<usize>,
    ) -> Result<usize, Box<dyn std::error::Error>> {
        let path = source.join(file);
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
        let parsed = syn::parse_file(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        self.files.push(file.to_path_buf());
        let index = self.files.len() - 1;
        // Children of `a/mod.rs` lie beside it; those of `a.rs` lie in `a/`.
        let stem = file.file_stem().and_then(|s| s.to_str()).unwrap_or_default();
        let beside = file.parent().unwrap_or(Path::new(""));
        let folder = match stem {
            "mod" | "lib" | "main" => beside.to_path_buf(),
            other => beside.join(other),
        };
        self.read_module(source, &folder, index, parent, parsed.items)
    }

    fn read_module(
        &mut self,
        source: &Path,
        folder: &Path,
        file: usize,
        parent: Option<usize>,
        items: Vec<Item>,
    ) -> Result<usize, Box<dyn std::error::Error>> {
        self.modules.push(Module { file, parent, ..Module::default() });
        let here = self.modules.len() - 1;
        for item in items {
            match item {
                Item::Mod(m) if !is_for_tests(&m.attrs) => self.read_child(source, folder, here, m)?,
                Item::Mod(_) => {}
                Item::Use(u) if !is_for_tests(&u.attrs) => {
                    let private = matches!(u.vis, Visibility::Inherited);
                    self.modules[here].import(&u.tree, &mut Vec::new(), private);
                }
                Item::Use(_) => {}
                item => self.declare(here, item),
            }
        }
        Ok(here)
    }

    fn read_child(
        &mut self,
        source: &Path,
        folder: &Path,
        here: usize,
        child: ItemMod,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let name = child.ident.to_string();
        let file = self.modules[here].file;
        let index = if let Some((_, items)) = child.content {
            self.read_module(source, &folder.join(&name), file, Some(here), items)?
        } else if let Some(other) = path_attribute(&child.attrs) {
            let beside = self.files[file].parent().unwrap_or(Path::new("")).to_path_buf();
            if other.starts_with("../..") {
                return Ok(()); // another crate's file
            }
            self.read_file(source, &beside.join(other), Some(here))?
        } else {
            let flat = folder.join(format!("{name}.rs"));
            let nested = folder.join(&name).join("mod.rs");
            let found = if source.join(&flat).is_file() { flat } else { nested };
            self.read_file(source, &found, Some(here))?
        };
        self.modules[here].children.entry(name).or_insert(index);
        Ok(())
    }

    fn declare(&mut self, here: usize, item: Item) {
        let (name, declared, attributes) = match &item {
            Item::Struct(i) => (&i.ident, Declared::Type, &i.attrs),
            Item::Enum(i) => (&i.ident, Declared::Type, &i.attrs),
            Item::Union(i) => (&i.ident, Declared::Type, &i.attrs),
            Item::Trait(i) => (&i.ident, Declared::Type, &i.attrs),
            Item::Type(i) => (&i.ident, Declared::Type, &i.attrs),
            Item::Fn(i) => (&i.sig.ident, Declared::Other, &i.attrs),
            Item::Const(i) => (&i.ident, Declared::Other, &i.attrs),
            Item::Static(i) => (&i.ident, Declared::Other, &i.attrs),
            Item::Macro(i) => {
                if let Some(name) = &i.ident {
                    self.macros.insert(name.to_string(), self.modules[here].file);
                }
                self.modules[here].items.push(item);
                return;
            }
            _ => {
                self.modules[here].items.push(item);
                return;
            }
        };
        if is_for_tests(attributes) {
            return;
        }
        self.modules[here].declared.insert(name.to_string(), declared);
        self.modules[here].items.push(item);
    }

    /// Resolves a path in a module; `None` where its target is outside this crate.
    pub fn resolve(&self, module: usize, path: &[String]) -> Option<Resolved> {
        self.resolve_within(module, path, MAX_HOPS)
    }

    fn resolve_within(&self, module: usize, path: &[String], hops: usize) -> Option<Resolved> {
        let hops = hops.checked_sub(1)?;
        let (first, mut rest) = path.split_first()?;
        let mut at = match first.as_str() {
            "crate" => Resolved::Module(0),
            "self" => Resolved::Module(module),
            "super" => Resolved::Module(self.modules[module].parent?),
            name => self.find(module, name, hops)?,
        };
        while let Resolved::Module(m) = at {
            let Some((next, behind)) = rest.split_first() else { break };
            rest = behind;
            at = match next.as_str() {
                "super" => Resolved::Module(self.modules[m].parent?),
                "self" => Resolved::Module(m),
                name => self.find(m, name, hops)?,
            };
        }
        Some(at)
    }

    fn find(&self, module: usize, name: &str, hops: usize) -> Option<Resolved> {
        let here = &self.modules[module];
        if here.declared.contains_key(name) {
            return Some(Resolved::Item(here.file, name.to_string()));
        }
        if let Some(&child) = here.children.get(name) {
            return Some(Resolved::Module(child));
        }
        if let Some(path) = here.imports.get(name) {
            // `use name;` and `use name::X` of a dependency refer to the dependency.
            if path.first().is_some_and(|first| first == name) {
                return None;
            }
            return self.resolve_within(module, path, hops);
        }
        here.globs.iter().find_map(|glob| match self.resolve_within(module, glob, hops)? {
            Resolved::Module(m) if m != module => self.find(m, name, hops.checked_sub(1)?),
            _ => None,
        })
    }
}

impl Module {
    /// Records the names that a `use` imports.
    pub fn import(&mut self, tree: &UseTree, prefix: &mut Vec<String>, private: bool) {
        let mut add = |name: String, path: Vec<String>| {
            if private {
                self.private_imports.push(path.clone());
            }
            self.imports.insert(name, path);
        };
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                self.import(&path.tree, prefix, private);
                prefix.pop();
            }
            UseTree::Name(name) if name.ident == "self" => {
                let last = prefix.last().cloned().unwrap_or_default();
                add(last, prefix.clone());
            }
            UseTree::Name(name) => {
                let name = name.ident.to_string();
                add(name.clone(), prefix.iter().cloned().chain([name]).collect());
            }
            UseTree::Rename(rename) => {
                let path = prefix.iter().cloned().chain([rename.ident.to_string()]).collect();
                add(rename.rename.to_string(), path);
            }
            UseTree::Glob(_) => self.globs.push(prefix.clone()),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.import(tree, prefix, private);
                }
            }
        }
    }
}

/// Tells whether `#[cfg(test)]` or `#[cfg(all(test, ..))]` stands before an item.
pub fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else { return false };
        let text: String = list.tokens.to_string().split_whitespace().collect();
        list.path.is_ident("cfg") && (text == "test" || text.starts_with("all(test,"))
    })
}

fn path_attribute(attributes: &[Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    })
}
