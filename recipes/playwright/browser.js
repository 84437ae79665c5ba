// Serves /srv/page on port 8080 of the guest.
const { readFile } = require("fs").promises;
const http = require("http");

http
  .createServer(async (request, response) => {
    response.setHeader("content-type", "text/html; charset=utf-8");
    response.end(await readFile("/srv/page/index.html"));
  })
  .listen(8080, "127.0.0.1", () => console.log("serving"));
