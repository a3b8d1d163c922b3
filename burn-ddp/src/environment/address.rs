//! Addresses as users and Slurm write them.

use std::path::PathBuf;

use crate::{DdpError, tcp::Place};

/// Reads a rendezvous address; `None` for `env://`.
pub(crate) fn parse_url(url: &str) -> Result<Option<Place>, DdpError> {
    let wrong = |problem: &str| DdpError::Url {
        url: url.into(),
        problem: problem.into(),
    };
    let (scheme, rest) = url.split_once("://").ok_or_else(|| wrong("no scheme"))?;
    match scheme {
        "env" => Ok(None),
        "file" if rest.starts_with('/') => Ok(Some(Place::File(PathBuf::from(rest)))),
        "file" => Err(wrong("the path is not absolute")),
        "tcp" => {
            let (host, port) = rest.rsplit_once(':').ok_or_else(|| wrong("no port"))?;
            let host = host.trim_start_matches('[').trim_end_matches(']');
            if host.is_empty() {
                return Err(wrong("no host"));
            }
            let port = port.parse().ok().filter(|port| *port != 0);
            Ok(Some(Place::Address {
                host: host.into(),
                port: port.ok_or_else(|| wrong("the port is not 1 to 65535"))?,
            }))
        }
        _ => Err(wrong("unknown scheme")),
    }
}

/// The first host of a Slurm host list such as `node[03-07,12],login1`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let end = list.find([',', '[']).unwrap_or(list.len());
    let (name, rest) = list.split_at(end);
    let host = match rest.strip_prefix('[') {
        None => name.to_string(),
        Some(numbers) => {
            let (numbers, after) = numbers.split_once(']')?;
            let first = numbers.split([',', '-']).next()?;
            let suffix = after.split(',').next()?;
            format!("{name}{first}{suffix}")
        }
    };
    (!host.is_empty()).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        let address = |host: &str, port| {
            Some(Place::Address {
                host: host.into(),
                port,
            })
        };
        assert_eq!(parse_url("tcp://h:80").unwrap(), address("h", 80));
        assert_eq!(parse_url("tcp://[::1]:80").unwrap(), address("::1", 80));
        assert_eq!(
            parse_url("file:///a/b").unwrap(),
            Some(Place::File("/a/b".into()))
        );
        assert_eq!(parse_url("env://").unwrap(), None);
        for url in [
            "h:80",
            "tcp://h",
            "tcp://:80",
            "tcp://h:0",
            "file://a",
            "http://h:1",
        ] {
            assert!(matches!(parse_url(url), Err(DdpError::Url { .. })), "{url}");
        }
    }

    #[test]
    fn host_lists() {
        for (list, host) in [
            ("node1", "node1"),
            ("node1,node2", "node1"),
            ("node[01-04,7]", "node01"),
            ("rack[3,5]-a,x", "rack3-a"),
            ("a,node[1-2]", "a"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        assert_eq!(first_host(""), None);
        assert_eq!(first_host("node[1"), None);
    }
}
