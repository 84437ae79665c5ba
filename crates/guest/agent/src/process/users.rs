//! Users and groups, read from the files: a static program must not load the guest's name service modules.

use std::fs;
use std::path::PathBuf;

use forkd_guest_proto::{AgentError, ErrorCode};

/// Who a process runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: PathBuf,
    pub shell: String,
}

/// The user files of the guest.
pub struct Users {
    passwd: String,
    group: String,
}

impl Users {
    /// Reads them; a missing file is an empty one.
    pub fn load() -> Self {
        let read = |path| fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned());
        Self {
            passwd: read("/etc/passwd").unwrap_or_default(),
            group: read("/etc/group").unwrap_or_default(),
        }
    }

    /// The user of a name, a number, or `uid:gid`.
    pub fn find(&self, text: &str) -> Result<User, AgentError> {
        let (who, group) = match text.split_once(':') {
            Some((who, group)) => (who, Some(group)),
            None => (text, None),
        };
        let not_found = || AgentError::new(ErrorCode::NotFound, format!("no user {text:?}"));
        let entry = match who.parse::<u32>() {
            Ok(uid) => self.entries().find(|user| user.uid == uid).or_else(|| {
                Some(User {
                    name: uid.to_string(),
                    uid,
                    gid: uid,
                    groups: Vec::new(),
                    home: "/".into(),
                    shell: "/bin/sh".into(),
                })
            }),
            Err(_) => self.entries().find(|user| user.name == who),
        };
        let mut user = entry.ok_or_else(not_found)?;
        user.groups = self.groups_of(&user.name);
        if let Some(group) = group {
            user.gid = self.gid(group).ok_or_else(not_found)?;
        }
        Ok(user)
    }

    /// The name of a user number.
    pub fn user_name(&self, uid: u32) -> Option<&str> {
        named(&self.passwd, uid)
    }

    /// The name of a group number.
    pub fn group_name(&self, gid: u32) -> Option<&str> {
        named(&self.group, gid)
    }

    fn gid(&self, group: &str) -> Option<u32> {
        group.parse().ok().or_else(|| {
            self.group.lines().find_map(|line| {
                let mut fields = line.split(':');
                (fields.next()? == group).then(|| fields.nth(1)?.parse().ok())?
            })
        })
    }

    fn entries(&self) -> impl Iterator<Item = User> + '_ {
        self.passwd.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?.to_owned();
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            let home = fields.nth(1).filter(|home| !home.is_empty()).unwrap_or("/");
            let shell = fields
                .next()
                .filter(|shell| !shell.is_empty())
                .unwrap_or("/bin/sh");
            Some(User {
                name,
                uid,
                gid,
                groups: Vec::new(),
                home: home.into(),
                shell: shell.into(),
            })
        })
    }

    fn groups_of(&self, name: &str) -> Vec<u32> {
        let lines = self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let gid = fields.nth(2)?.parse().ok()?;
            fields
                .next()?
                .split(',')
                .any(|member| member == name)
                .then_some(gid)
        });
        lines.take(256).collect()
    }
}

fn named(file: &str, number: u32) -> Option<&str> {
    file.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(number)).then_some(name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn users() -> Users {
        Users {
            passwd:
                "root:x:0:0:root:/root:/bin/bash\n# junk\nann:x:1000:100::/home/ann:\nbad:x:q:1::\n"
                    .into(),
            group: "root:x:0:\nusers:x:100:\nvideo:x:44:bob,ann\naudio:x:29:ann\n".into(),
        }
    }

    #[test]
    fn names_numbers_and_pairs_are_found() {
        let ann = users().find("ann").unwrap();
        assert_eq!(
            (ann.uid, ann.gid, ann.groups.as_slice()),
            (1000, 100, [44, 29].as_slice())
        );
        assert_eq!(
            (ann.home.to_str(), ann.shell.as_str()),
            (Some("/home/ann"), "/bin/sh")
        );
        assert_eq!(users().find("1000").unwrap(), ann);
        assert_eq!(users().find("ann:video").unwrap().gid, 44);
        let stranger = users().find("4242:77").unwrap();
        assert_eq!((stranger.uid, stranger.gid), (4242, 77));
        assert_eq!(
            users().find("nobody").unwrap_err().code,
            ErrorCode::NotFound
        );
        assert_eq!(users().find("bad").unwrap_err().code, ErrorCode::NotFound);
        assert_eq!(
            (users().user_name(1000), users().group_name(29)),
            (Some("ann"), Some("audio"))
        );
    }

    proptest! {
        #[test]
        fn any_files_are_survived(passwd in ".*", group in ".*", who in ".*") {
            let _ = Users { passwd, group }.find(&who);
        }
    }
}
